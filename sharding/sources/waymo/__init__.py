"""Waymo Open Dataset, perception: TFRecord files of version 1, and Parquet files of version 2."""
