"""The dataset on disk: what a sample holds, shards, index and manifest."""
