"""Bridges to other libraries, each an extra: imported only when named, and by nobody else in the package."""
