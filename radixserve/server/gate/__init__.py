"""What happens before a route is called, and the state that routes share.

`middleware.py` checks each request and reads its body; `tenants.py` checks API keys; `limits.py`
answers 429; `http_protocol.py` bounds connections and has the write timeout; `state.py` has
`AppState`.
"""
