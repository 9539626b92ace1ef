"""How the synthetic drive looks: blocks, materials, polygons on pixels, and the picture of one camera."""
