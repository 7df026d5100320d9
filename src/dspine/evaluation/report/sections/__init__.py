"""The chapters of the page, one file each: results in, a Section out, or None where there is no such result."""
