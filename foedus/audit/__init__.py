"""`foedus audit`: what messages reveal about rows, and what hostile clients can do."""
