/* Steps of Kimi delta attention (products.md): for each head and token S <- decay S; u = k S;
 * S <- S + k (beta (v - u)); o = q S.
 *
 * Lanes are columns, which do not meet. A pass over the state writes a token's update, reads its output and at once
 * applies the decay of the next token and sums its u, so that T tokens take T + 1 passes. */

struct head {
    const float *q, *k, *v, *decay, *beta; /* of the first token */
    float *state, *out;
    int64_t tokens, dk, dv;
    int64_t key_step, value_step, beta_step; /* from a token to the next */
};

/* Columns c to c + 16 x KDA_TILE of a head. */
PATH_INLINE void kda_columns(const struct head *h, int64_t c, const int tile)
{
    wide u[KDA_TILE], d[KDA_TILE], o[KDA_TILE];
    for (int l = 0; l < tile; l++) u[l] = wide_zero();
    for (int64_t i = 0; i < h->dk; i++) {
        float *s = h->state + i * h->dv + c;
        for (int l = 0; l < tile; l++) {
            wide decayed = wide_multiply(wide_all(h->decay[i]), wide_load(s + l * WIDE));
            wide_store(s + l * WIDE, decayed);
            u[l] = wide_fma(wide_all(h->k[i]), decayed, u[l]);
        }
    }
    for (int64_t t = 0; t < h->tokens; t++) {
        const float *q = h->q + t * h->key_step, *k = h->k + t * h->key_step;
        for (int l = 0; l < tile; l++) {
            wide gap = wide_subtract(wide_load(h->v + t * h->value_step + c + l * WIDE), u[l]);
            d[l] = wide_multiply(wide_all(h->beta[t * h->beta_step]), gap);
            o[l] = wide_zero();
            u[l] = wide_zero();
        }
        if (t + 1 < h->tokens) {
            const float *next = k + h->key_step, *decay = h->decay + (t + 1) * h->key_step;
            for (int64_t i = 0; i < h->dk; i++) {
                float *s = h->state + i * h->dv + c;
                for (int l = 0; l < tile; l++) {
                    wide updated = wide_fma(wide_all(k[i]), d[l], wide_load(s + l * WIDE));
                    o[l] = wide_fma(wide_all(q[i]), updated, o[l]);
                    wide decayed = wide_multiply(wide_all(decay[i]), updated);
                    wide_store(s + l * WIDE, decayed);
                    u[l] = wide_fma(wide_all(next[i]), decayed, u[l]);
                }
            }
        } else {
            for (int64_t i = 0; i < h->dk; i++) {
                float *s = h->state + i * h->dv + c;
                for (int l = 0; l < tile; l++) {
                    wide updated = wide_fma(wide_all(k[i]), d[l], wide_load(s + l * WIDE));
                    wide_store(s + l * WIDE, updated);
                    o[l] = wide_fma(wide_all(q[i]), updated, o[l]);
                }
            }
        }
        for (int l = 0; l < tile; l++) wide_store(h->out + t * h->value_step + c + l * WIDE, o[l]);
    }
}

/* One column: what a whole vector does not hold. */
static void kda_column(const struct head *h, int64_t c)
{
    for (int64_t t = 0; t < h->tokens; t++) {
        const float *q = h->q + t * h->key_step, *k = h->k + t * h->key_step, *decay = h->decay + t * h->key_step;
        float u = 0.0f, o = 0.0f;
        for (int64_t i = 0; i < h->dk; i++) {
            float *s = h->state + i * h->dv + c;
            *s = decay[i] * *s;
            u = fmaf(k[i], *s, u);
        }
        float d = h->beta[t * h->beta_step] * (h->v[t * h->value_step + c] - u);
        for (int64_t i = 0; i < h->dk; i++) {
            float *s = h->state + i * h->dv + c;
            *s = fmaf(k[i], d, *s);
            o = fmaf(q[i], *s, o);
        }
        h->out[t * h->value_step + c] = o;
    }
}

static void PATH(kda_steps)(const struct kda *a, float *state, const float *q, const float *k, const float *v,
                            const float *decay, const float *beta, float *out)
{
    for (int64_t head = a->first; a->tokens && head < a->stop; head++) {
        struct head h = {q + head * a->dk,
                         k + head * a->dk,
                         v + head * a->dv,
                         decay + head * a->dk,
                         beta + head,
                         state + head * a->dk * a->dv,
                         out + head * a->dv,
                         a->tokens,
                         a->dk,
                         a->dv,
                         a->heads * a->dk,
                         a->heads * a->dv,
                         a->heads};
        int64_t c = 0;
        for (; c + WIDE * KDA_TILE <= a->dv; c += WIDE * KDA_TILE) kda_columns(&h, c, KDA_TILE);
        for (; c + WIDE <= a->dv; c += WIDE) kda_columns(&h, c, 1);
        for (; c < a->dv; c++) kda_column(&h, c);
    }
}
