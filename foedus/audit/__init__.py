"""What messages tell about the rows they were made from, and what hostile clients can do: `foedus
audit`.
"""
