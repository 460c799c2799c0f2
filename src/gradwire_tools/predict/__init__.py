"""`gradwire sim` and `gradwire plan`: what the simulator and the planner expect."""
