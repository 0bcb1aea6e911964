"""Recipes: what is accepted, what is refused, and that they travel through JSON unchanged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from formats.errors import FormatError, UsageError
from packer.recipe.recipe import (
    DropRule,
    GroupInt,
    GroupIntRule,
    Mxfp4,
    Raw,
    RawRule,
    Recipe,
    Rvq,
    SourceBytes,
    bundled_recipes,
    choose_rule,
    default_recipe,
    load_recipe,
    moved_limits,
    override,
    plain,
    recipe_from_builtins,
    resolve,
    usual_limit,
)

MINIMAL = """
name = "mine"
families = ["kimi_k3"]
[experts]
codec = "rvq"
stages = 2
entries = 16
max_rel_error = 1
[[trunk]]
names = ["*"]
codec = "raw"
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_four_bundled_recipes() -> None:
    assert bundled_recipes() == ("kimi-k3", "kimi-k3-lossless", "kimi-linear", "kimi-linear-lossless")
    for name in bundled_recipes():
        assert load_recipe(name).name == name


@pytest.mark.parametrize("name", bundled_recipes())
def test_a_recipe_travels_through_json_unchanged(name: str) -> None:
    recipe = load_recipe(name)
    text = json.dumps(msgspec.to_builtins(recipe))
    assert msgspec.convert(json.loads(text), Recipe) == recipe
    assert recipe_from_builtins(json.loads(text), where="manifest.json", error=FormatError) == recipe
    assert json.loads(text) == plain(recipe)


def test_kimi_k3_is_three_bits_with_a_lossless_fallback() -> None:
    recipe = default_recipe("kimi_k3")
    assert recipe.experts == Rvq(stages=3, entries=256, codebooks="expert", max_rel_error=0.25, fallback=SourceBytes())
    assert (recipe.fitting.seed, recipe.source.mxfp4_bias) == (0, 127)


def test_kimi_linear_falls_back_to_eight_bits() -> None:
    recipe = default_recipe("kimi_linear")
    assert isinstance(recipe.experts, Rvq)
    assert recipe.experts.fallback == GroupInt(bits=8, group=128, max_rel_error=0.012)


@pytest.mark.parametrize("name", ["kimi-k3-lossless", "kimi-linear-lossless"])
def test_lossless_recipes_allow_no_error_anywhere(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.experts == SourceBytes()
    assert all(isinstance(rule, RawRule) and rule.max_rel_error == 0.0 for rule in recipe.trunk)


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear"])
@pytest.mark.parametrize(
    ("role", "codec", "bits"),
    [
        ("router", "raw", None),
        ("router_bias", "raw", None),
        ("norm", "raw", None),
        ("residual", "raw", None),
        ("decay", "raw", None),
        ("conv", "raw", None),
        ("vision", "raw", None),
        ("projector", "raw", None),
        ("embedding", "group_int", 8),
        ("head", "group_int", 8),
        ("attention_gate", "group_int", 8),
        ("attention", "group_int", 4),
        ("latent", "group_int", 4),
        ("shared_expert", "group_int", 4),
        ("dense_mlp", "group_int", 4),
    ],
)
def test_dty_11_what_each_role_gets(name: str, role: str, codec: str, bits: int | None) -> None:
    _, rule = choose_rule(load_recipe(name), "some.tensor", role, 2)
    assert rule.codec == codec
    assert getattr(rule, "bits", None) == bits


@pytest.mark.parametrize("name", bundled_recipes())
def test_pln_03_an_unknown_tensor_is_not_dropped_or_copied_by_accident(name: str) -> None:
    with pytest.raises(UsageError, match=r"mm_projector\.extra.*no rule.*unknown"):
        choose_rule(load_recipe(name), "mm_projector.extra", "unknown", 2)


def test_shp_06_a_matrix_rule_does_not_take_a_convolution(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        'names = ["*"]\ncodec = "raw"', 'names = ["*"]\ncodec = "group_int"\nbits = 8\nmax_rel_error = 0.1'
    )
    recipe = load_recipe(write(tmp_path, text))
    assert choose_rule(recipe, "patch", "vision", 2)[0] == 0
    with pytest.raises(UsageError, match=r"vision_tower\.patch_embed\.proj\.weight.*rank 4"):
        choose_rule(recipe, "vision_tower.patch_embed.proj.weight", "vision", 4)


def test_the_first_rule_that_takes_a_tensor_decides() -> None:
    recipe = Recipe(
        name="mine",
        families=("kimi_k3",),
        experts=Mxfp4(),
        trunk=(
            DropRule(names=("vision_tower.*", "*.bias")),
            GroupIntRule(roles=("head",), names=("*.weight",), bits=8, max_rel_error=0.1),
            RawRule(roles=("head",)),
            RawRule(names=("*",), ranks=(0, 1)),
        ),
    )
    assert choose_rule(recipe, "vision_tower.a.b.c", "vision", 4)[0] == 0
    assert choose_rule(recipe, "a.bias", "head", 1)[0] == 0
    assert choose_rule(recipe, "lm_head.weight", "head", 2)[0] == 1
    assert choose_rule(recipe, "lm_head.weight", "head", 3)[0] == 2  # a group_int rule takes matrices only
    assert choose_rule(recipe, "lm_head.scale", "head", 2)[0] == 2  # roles and names must both fit
    assert choose_rule(recipe, "VISION_TOWER.x", "norm", 1)[0] == 3  # names are case sensitive
    with pytest.raises(UsageError):
        choose_rule(recipe, "x", "norm", 2)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("entries = 16", "entries = 300", r"experts\.entries"),
        ("entries = 16", "entries = 0", r"experts\.entries"),
        ("stages = 2", "stages = 0", r"experts\.stages"),
        ("stages = 2", "stages = 5", r"experts\.stages"),
        ("stages = 2", "stages = 2.0", r"experts\.stages"),
        ("stages = 2", "stages = true", r"experts\.stages"),
        ("stages = 2", 'stages = "2"', r"experts\.stages"),
        ("stages = 2", "", r"experts.*stages"),
        ("stages = 2", "stagez = 2\nstages = 2", r"experts.*stagez"),
        ("max_rel_error = 1", "max_rel_error = nan", r"experts\.max_rel_error"),
        ("max_rel_error = 1", "max_rel_error = inf", r"experts\.max_rel_error"),
        ("max_rel_error = 1", "max_rel_error = -0.1", r"experts\.max_rel_error"),
        ("max_rel_error = 1", "", r"max_rel_error"),
        ('"rvq"', '"zip"', r"experts\.codec"),
        ('"raw"', '"raw"\nmax_rel_error = 0.1', r"trunk\.0\.max_rel_error"),
        ('"raw"', '"raw"\nbits = 4', r"trunk\.0"),
        ('"raw"', '"group_int"\nbits = 5\nmax_rel_error = 1', r"trunk\.0\.bits"),
        ('"raw"', '"group_int"\nbits = 4\ngroup = 48\nmax_rel_error = 1', r"trunk\.0\.group"),
        ('"raw"', '"group_int"\nbits = 4\ngroup = 0\nmax_rel_error = 1', r"trunk\.0\.group"),
        ('"raw"', '"group_int"\nbits = 4\ngroup = 2048\nmax_rel_error = 1', r"trunk\.0\.group"),
        ('"raw"', '"group_int"\nbits = 4\nranks = [2, 3]\nmax_rel_error = 1', r"trunk\.0\.ranks"),
        ('"raw"', '"raw"\nranks = []', r"trunk\.0\.ranks"),
        ('"raw"', '"raw"\nranks = [9]', r"trunk\.0\.ranks"),
        ('names = ["*"]', "", r"trunk\.0"),
        ('names = ["*"]', 'roles = ["routers"]', r"trunk\.0\.roles.*routers"),
        ('families = ["kimi_k3"]', "families = []", "families"),
        ('families = ["kimi_k3"]', 'families = "kimi_k3"', "families"),
        ('name = "mine"', 'name = "a b"', "name"),
        ('name = "mine"', "", "name"),
        ("[experts]", "[fitting]\nseed = -1\n[experts]", r"fitting\.seed"),
        ("[experts]", "[fitting]\nseed = 1979-05-27\n[experts]", r"fitting\.seed"),
        ("[experts]", '[fitting]\neffort = "all"\n[experts]', r"fitting\.effort"),
        ("[experts]", "[source]\nmxfp4_bias = 0\n[experts]", r"source\.mxfp4_bias"),
        ("[experts]", "[experts]\n[experts]", "TOML"),
        ("stages = 2", "stages = " + "9" * 5000, "number or a key that is too long"),
        ("stages = 2", "stages = " + "[" * 5000, "nested too deeply$"),
    ],
)
def test_qnt_08_malformed_recipes_are_refused_by_key(tmp_path: Path, old: str, new: str, place: str) -> None:
    assert old in MINIMAL
    with pytest.raises(UsageError, match=place):
        load_recipe(write(tmp_path, MINIMAL.replace(old, new, 1)))


def test_qnt_08_one_entry_is_legal(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL.replace("entries = 16", "entries = 1")))
    assert isinstance(recipe.experts, Rvq)
    assert recipe.experts.entries == 1


def test_what_a_recipe_leaves_out_is_explicit_once_loaded(tmp_path: Path) -> None:
    document = plain(load_recipe(write(tmp_path, MINIMAL)))
    assert document["fitting"] == {"seed": 0, "effort": "default"}
    assert document["source"] == {"mxfp4_bias": 127}
    assert document["experts"]["codebooks"] == "expert"
    assert document["experts"]["fallback"] is None


def test_pln_09_tilde_in_a_recipe_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, MINIMAL)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_recipe("~/mine.toml").name == "mine"


def test_missing_unreadable_and_oversized_recipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("no-such", str(tmp_path), "a\0b", ""):
        with pytest.raises(UsageError) as caught:
            load_recipe(name)
        assert "kimi-k3-lossless" in (caught.value.hint or "")
    for name, what in (
        ("no-such", "no recipe of that name"),
        ("no-such.toml", "no such recipe file"),
        ("no/such", "no such recipe file"),
        (str(tmp_path), "not a regular file"),
        (str(tmp_path / "pipe"), "not a regular file"),
    ):
        with pytest.raises(UsageError, match=what):
            load_recipe(name)
    with pytest.raises(UsageError, match="too long"):
        load_recipe(write(tmp_path, MINIMAL + "#" * (1 << 20)))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(UsageError, match="TOML"):
        load_recipe(str(tmp_path / "latin.toml"))


def test_no_default_recipe_for_a_family_that_none_is_bundled_for() -> None:
    with pytest.raises(UsageError, match="mixtral"):
        default_recipe("mixtral")


def test_override_changes_what_it_names_and_nothing_else() -> None:
    recipe = load_recipe("kimi-k3")
    changed = override(recipe, ["experts.stages=2", "experts.codebooks=matrix", "trunk.2.bits=4", "fitting.seed=7"])
    expected = plain(recipe)
    expected["name"] = "kimi-k3+set"
    expected["summary"] = (
        "changed: fitting.seed=7, experts.stages=2, experts.codebooks=matrix, experts.max_rel_error=0.428,"
        " trunk.2.bits=4, trunk.2.max_rel_error=0.2; otherwise as kimi-k3"
    )
    expected["experts"] |= {"stages": 2, "codebooks": "matrix", "max_rel_error": 0.428}  # 1.25 * 0.585**2
    expected["trunk"][2] |= {"bits": 4, "max_rel_error": 0.2}
    expected["fitting"]["seed"] = 7
    assert plain(changed) == expected


def test_limits_that_move_with_a_setting_are_said() -> None:
    recipe = load_recipe("kimi-k3")
    settings = ["experts.stages=2", "trunk.1.bits=4"]
    assert moved_limits(recipe, override(recipe, settings), settings) == [
        "limit of experts: 0.25 -> 0.428, usual for 2 stages of 256",
        "limit of trunk.1: 0.012 -> 0.2, usual for 4 bits",
    ]
    settings = ["experts.stages=2", "experts.max_rel_error=0.3"]
    assert moved_limits(recipe, override(recipe, settings), settings) == []
    lossless = ["experts.codec=source"]
    assert moved_limits(recipe, override(recipe, lossless), lossless) == [
        "limit of experts: 0.25 -> 0, usual for source"
    ]


def test_the_summary_of_a_changed_recipe_says_what_was_changed() -> None:
    recipe = load_recipe("kimi-k3")
    one, two = "experts.stages=2", "fitting.seed=1"
    assert override(recipe, [one, two]) == override(recipe, [two, one])  # the order decides no bytes
    assert override(recipe, ["experts.stages=3"]).summary == recipe.summary
    assert override(recipe, [one, "summary=mine"]).summary == "mine"
    assert override(recipe, ["name=mine"]).summary == recipe.summary
    assert "experts.stages=2" in override(override(recipe, [one]), [two]).summary
    names = '"x",' * 50
    many = [f"trunk.{rule}.names=[{names}]" for rule in range(5)]
    changed = override(recipe, [*many, one, two])
    assert len(changed.summary) < 700
    assert changed.summary.endswith(" and 2 more; otherwise as kimi-k3")
    for number in range(200):
        changed = override(changed, [f"fitting.seed={number}"])  # never longer than a recipe may be


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("stages = 2", ""), "experts.stages: key is absent"),
        (("stages = 2", "stages = 2\nstagez = 2"), "experts.stagez: unknown key"),
        (("stages = 2", 'stages = "2"'), "experts.stages: value has the wrong type (expected int, found '2')"),
        (("stages = 2", "stages = 9"), "experts.stages: value is not allowed (expected int <= 4, found 9)"),
        (("families = [", "summary = 3\nfamilies = ["), "summary: value has the wrong type (expected str, found 3)"),
        (
            ('families = ["kimi_k3"]', "families = []"),
            "families: value is not allowed (expected list of length >= 1,",
        ),
        (('"raw"', '"zip"'), "trunk.0.codec: unknown value (expected rvq, "),
        (
            ("[experts]", '[fitting]\neffort = "all"\n[experts]'),
            "expected fast, default or max, found 'all'",
        ),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_in_our_words(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in MINIMAL
    with pytest.raises(UsageError) as caught:
        load_recipe(write(tmp_path, MINIMAL.replace(*change, 1)))
    assert message in caught.value.line()
    assert "`" not in caught.value.line()


def test_override_to_the_present_value_is_no_change() -> None:
    recipe = load_recipe("kimi-k3")
    assert override(recipe, []) == recipe
    assert override(recipe, ["experts.stages=3", "trunk.1.bits=8"]) == recipe


def test_override_marks_the_name_once_and_lets_it_be_chosen() -> None:
    recipe = load_recipe("kimi-k3")
    once = override(recipe, ["fitting.seed=1"])
    assert override(once, ["fitting.seed=2"]).name == once.name == "kimi-k3+set"
    assert override(recipe, ["fitting.seed=1", "name=mine"]).name == "mine"
    longest = override(recipe, [f"name={'n' * 64}"])
    assert override(longest, ["fitting.seed=1"]).name == "n" * 60 + "+set"


def test_an_explicit_limit_outlives_the_settings_around_it() -> None:
    changed = override(load_recipe("kimi-k3"), ["experts.max_rel_error=0.5", "experts.stages=2", "experts.entries=16"])
    assert changed.experts.max_rel_error == 0.5


def test_another_codec_starts_its_table_anew() -> None:
    recipe = load_recipe("kimi-k3")
    assert override(recipe, ["experts.codec=mxfp4"]).experts == Mxfp4()
    changed = override(recipe, ["experts.codec=group_int", "experts.bits=4", "trunk.1.codec=raw", "trunk.0.codec=drop"])
    assert changed.experts == GroupInt(bits=4, group=128, max_rel_error=0.2)
    assert changed.trunk[1] == RawRule(roles=("embedding", "head"), ranks=(2,))
    assert changed.trunk[0] == DropRule(roles=("router", "router_bias", "norm", "residual", "decay", "conv"))
    back = override(override(recipe, ["experts.codec=mxfp4"]), ["experts.codec=rvq"]).experts
    assert back == Rvq(stages=3, entries=256, max_rel_error=0.25)


def test_an_absent_fallback_can_be_set() -> None:
    recipe = override(load_recipe("kimi-k3"), ["experts.codec=mxfp4"])
    recipe = override(recipe, ["experts.codec=rvq", "experts.fallback.codec=mxfp4"])
    assert isinstance(recipe.experts, Rvq)
    assert recipe.experts.fallback == Mxfp4()


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("experts.stages=0", r"experts\.stages"),
        ("experts.stages=2.0", r"experts\.stages"),
        ("experts.stages=true", r"experts\.stages"),
        ("experts.stages=two", r"experts\.stages"),
        ("experts.stages=", r"experts\.stages"),
        ("experts.stages=2\nname='x'", "printed"),
        ("experts.entries=300", r"experts\.entries"),
        ("experts.stagez=2", r"experts\.stagez"),
        ("expert.stages=2", "--set expert:"),
        ("experts.stages.deep=2", r"experts\.stages\.deep"),
        ("experts=3", "experts"),
        ("experts.fallback.bits=4", r"experts\.fallback\.bits"),
        ("experts.codec=zip", r"experts\.codec"),
        ("trunk.1.codec=rvq", r"trunk\.1\.codec"),
        ("trunk.5.bits=4", r"trunk\.5"),
        ("trunk.-1.bits=4", r"trunk\.-1"),
        ("trunk.one.bits=4", r"trunk\.one"),
        ("trunk.1=raw", r"trunk\.1"),
        ("trunk.bits=4", "trunk.bits"),
        ('trunk.1.names=["\udcff"]', "printed"),
        ("experts.stages", "key=value"),
        ("=2", "key=value"),
        ("", "key=value"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_key(setting: str, place: str) -> None:
    with pytest.raises(UsageError, match=place):
        override(load_recipe("kimi-k3"), [setting])


def test_a_setting_that_would_take_minutes_to_parse_is_a_text() -> None:
    """In seconds: a test that hangs is ended."""
    for value in (f"{{a{'.a' * 60_000} = 1}}", "9" * 100_000, "[" * 100_000):
        with pytest.raises(UsageError, match=r"experts\.stages: value has the wrong type .*expected int"):
            override(load_recipe("kimi-k3"), [f"experts.stages={value}"])
    dotted = "after version 1.2.3.4.5.6.7.8.9.10"
    assert override(load_recipe("kimi-k3"), [f"summary={dotted}"]).summary == dotted


@pytest.mark.parametrize(("expert_format", "own"), [("mxfp4", Mxfp4()), ("dense", Raw())])
def test_source_becomes_the_lossless_codec_of_the_experts_format(expert_format: str, own: Mxfp4 | Raw) -> None:
    lossless = resolve(load_recipe("kimi-k3-lossless"), family="kimi_k3", expert_format=expert_format)
    assert lossless.experts == own
    default = resolve(load_recipe("kimi-k3"), family="kimi_k3", expert_format=expert_format)
    assert isinstance(default.experts, Rvq)
    assert default.experts.fallback == own


def test_resolve_checks_the_family_and_the_experts_format() -> None:
    recipe = override(load_recipe("kimi-k3"), ["experts.fallback.codec=mxfp4"])
    assert resolve(recipe, family="kimi_k3", expert_format="mxfp4") == recipe
    with pytest.raises(UsageError, match=r"families.*kimi_linear"):
        resolve(recipe, family="kimi_linear", expert_format="dense")
    with pytest.raises(UsageError, match=r"experts\.fallback\.codec") as caught:
        resolve(recipe, family="kimi_k3", expert_format="dense")
    assert "source" in (caught.value.hint or "")
    with pytest.raises(UsageError, match=r"experts\.codec") as caught:
        resolve(override(recipe, ["experts.codec=raw"]), family="kimi_k3", expert_format="mxfp4")
    assert "source" in (caught.value.hint or "")
    forged = msgspec.structs.replace(recipe, experts=Rvq(stages=0, entries=256, max_rel_error=0.25))
    with pytest.raises(UsageError, match=r"experts\.stages"):
        resolve(forged, family="kimi_k3", expert_format="mxfp4")


def test_usual_limits() -> None:
    assert usual_limit("rvq", stages=3, entries=256) == 0.25
    assert usual_limit("rvq", stages=4, entries=256) == 0.146  # 1.25 * 0.585**4 = 0.14640
    assert usual_limit("rvq", stages=2, entries=16) == 0.731  # 1.25 * 0.585 = 0.73125
    assert usual_limit("rvq", stages=3, entries=1) == 1.25
    assert (usual_limit("group_int", bits=4), usual_limit("group_int", bits=8)) == (0.2, 0.012)
    assert usual_limit("raw") == usual_limit("mxfp4") == 0.0


def test_recipes_that_would_take_minutes_are_refused(tmp_path: Path) -> None:
    """Long dotted keys, floods of patterns, and patterns of stars: refused at once, with the key that is to blame."""
    bomb = tmp_path / "bomb.toml"
    bomb.write_text("a" + ".a" * 500_000 + " = 1\n")
    with pytest.raises(UsageError, match="too long"):
        load_recipe(str(bomb))
    text = (Path(__file__).parent.parent.parent / "recipes" / "kimi-k3.toml").read_text()
    for names, fragment in (('", "'.join(["*e*"] * 300), "names"), ("*e" * 20, "stars")):
        bomb.write_text(f'{text}\n[[trunk]]\nnames = ["{names}"]\ncodec = "drop"\n')
        with pytest.raises(UsageError, match=fragment):
            load_recipe(str(bomb))
