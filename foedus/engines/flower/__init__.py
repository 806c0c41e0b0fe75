"""foedus between real sites: a Flower ServerApp and ClientApp for every algorithm.

`foedus.engines.flower.client.app` is the ClientApp, `foedus.engines.flower.server.server_app(file)`
makes a ServerApp; `foedus deploy init` writes a folder with both. `fd.Flower` is the same on
loopback, as an engine of `fd.run`.
"""
