"""Optional libraries of other people. Imported only where a setting names one."""
