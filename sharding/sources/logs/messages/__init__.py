"""Messages of ROS 2 and foxglove in neutral terms."""
