"""Outer synchronisation: replicas that train by themselves and meet every H steps."""
