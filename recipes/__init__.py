"""The bundled recipes, one TOML file a model and tier; ``packer.recipe`` reads them."""
