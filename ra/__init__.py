"""The attentions under study: one name gives one attention a layer."""
