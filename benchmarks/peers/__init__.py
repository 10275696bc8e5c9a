"""Other queues, each as its own documentation recommends for throughput.

A peer is a module with a function from the URL of an empty database and some payloads to a number: it makes its schema,
enqueues the payloads as quickly as it can, and returns how many jobs a second a single process works off with a handler
that does nothing. How long the enqueueing takes is not compared here.
"""
