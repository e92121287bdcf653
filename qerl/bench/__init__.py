"""Benchmarks behind `qerl bench`: each prints a table and ends in one line of JSON."""
