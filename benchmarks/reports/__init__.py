"""Reports of what was measured: all benchmarks in a row, comparisons, pictures, the page. Not in a wheel."""
