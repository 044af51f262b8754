"""BalanceKV: vector balancing, in practice and with its error bound."""
