"""Which rows a loader gave, on which ranks: any loader's."""
