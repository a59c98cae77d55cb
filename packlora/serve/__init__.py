"""A training service: many people train adapters on one frozen model at once, by the Tinker protocol.

Requests of all tenants are packed into shared microbatches of the engine. app.py speaks HTTP, service.py owns the thread that
computes, journal.py keeps what was promised, ranks/ is a service on several processes. The core imports nothing of this
folder; the command does when it is called.
"""
