"""Parts of models from the literature, one file each. File name.py is variant NAME; docs/variants.md lists them."""
