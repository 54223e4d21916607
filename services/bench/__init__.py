"""The serving benchmark: data sets, arrivals, cheap clients for HTTP and NATS, figures. Knows no service."""
