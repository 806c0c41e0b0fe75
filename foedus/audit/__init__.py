"""`foedus audit`: what messages tell about rows, and what hostile clients can do."""
