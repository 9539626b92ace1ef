"""KITTI: raw drives, and the frames of the object benchmark."""
