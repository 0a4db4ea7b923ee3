"""The server of `run tinker`: training and sampling over HTTP, by the protocol of the Tinker SDK.

client ──HTTP──▶ app: keys, futures, order ──operations──▶ service, on every rank: tenants over one base, an engine
"""
