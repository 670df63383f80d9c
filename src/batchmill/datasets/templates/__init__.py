"""Templates of callers: they are compiled and rendered in a process of their own, which is killed at its bounds."""
