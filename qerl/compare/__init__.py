"""Runs beside each other: those that differ only in their seed are one curve with a band."""
