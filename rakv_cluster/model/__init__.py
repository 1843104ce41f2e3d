"""The target model: loading, the forward primitive, sampling."""
