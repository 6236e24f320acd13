"""What serves: coordinator and reducer behind one port, with limits, health and metrics."""
