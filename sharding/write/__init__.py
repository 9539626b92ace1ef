"""Write shards: read the source's bytes, encode members, pack tars."""
