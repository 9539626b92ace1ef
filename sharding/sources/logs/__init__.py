"""Robots' logs: MCAP and rosbag2, and the video in them."""
