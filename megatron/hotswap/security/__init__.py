"""Who belongs to a job: its certificate authority (authority.py), the files that its processes show (files.py), TLS with them (tls.py).

The launcher makes the authority, signs one certificate for each role, and forgets the authority's key. docs/security.md says what
that protects, and what it does not.
"""
