//! Flags of traces. Their environment variables are those of OpenTelemetry's own libraries.

use chiasm_otlp::{Endpoint, Exporter, Headers};
use chiasm_server::Traces;
use clap::Args;

use super::fraction;
use crate::error::CliError;

const SERVICE_NAME: &str = "chiasm";

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// URL of an OpenTelemetry collector to which traces are sent, by OTLP over HTTP, such as
    /// http://HOST:4318/v1/traces [default: no traces are sent]
    // Parsed later: clap's errors quote the value, which may contain a password.
    #[arg(
        long,
        env = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        hide_env_values = true,
        value_name = "URL"
    )]
    pub(crate) otlp_traces_endpoint: Option<String>,
    /// Headers for the collector, such as a key, as NAME=VALUE,NAME=VALUE. Users who can list this
    /// machine's processes see them: the environment variable hides them
    // Parsed later, for the same reason.
    #[arg(
        long,
        env = "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        hide_env_values = true,
        value_name = "HEADERS"
    )]
    pub(crate) otlp_traces_headers: Option<String>,
    /// Fraction of requests without a traceparent header to trace, 0 to 1; a traceparent decides
    /// for its own request
    #[arg(
        long,
        env = "CHIASM_OTLP_TRACES_SAMPLE",
        value_name = "PART",
        default_value_t = 1.0,
        value_parser = fraction
    )]
    pub(crate) otlp_traces_sample: f64,
    /// Name of this service in traces
    #[arg(long, env = "OTEL_SERVICE_NAME", value_name = "NAME", default_value = SERVICE_NAME)]
    pub(crate) otlp_service_name: String,
}

impl TraceArgs {
    /// Starts the export of traces, if an endpoint is given.
    ///
    /// # Errors
    /// [`CliError::Usage`] for an invalid endpoint or header, or if the exporter can't start.
    pub(crate) fn traces(&self) -> Result<Option<Traces>, CliError> {
        let Some((endpoint, headers)) = self.collector()? else { return Ok(None) };
        let service =
            if self.otlp_service_name.is_empty() { SERVICE_NAME } else { &self.otlp_service_name };
        let exporter =
            Exporter::start(endpoint.clone(), headers, service, env!("CARGO_PKG_VERSION"));
        let exporter = exporter
            .map_err(|error| CliError::Usage(format!("--otlp-traces-endpoint: {error}")))?;
        tracing::info!(%endpoint, sample = self.otlp_traces_sample, "sending traces");
        Ok(Some(Traces::new(exporter, self.otlp_traces_sample)))
    }

    /// Checks the collector's URL and headers.
    ///
    /// # Errors
    /// [`CliError::Usage`] for an invalid endpoint or header.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        self.collector().map(drop)
    }

    /// Parses the collector's URL and headers. Returns `None` if no traces are sent.
    fn collector(&self) -> Result<Option<(Endpoint, Headers)>, CliError> {
        // As in OpenTelemetry's libraries, an empty variable counts as unset.
        let endpoint = self.otlp_traces_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
        let Some(endpoint) = endpoint else { return Ok(None) };
        let endpoint: Endpoint = endpoint
            .parse()
            .map_err(|error| CliError::Usage(format!("--otlp-traces-endpoint: {error}")))?;
        let headers = self.otlp_traces_headers.as_deref().unwrap_or_default().parse::<Headers>();
        let headers =
            headers.map_err(|error| CliError::Usage(format!("--otlp-traces-headers: {error}")))?;
        Ok(Some((endpoint, headers)))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{Cli, Command};

    #[test]
    fn empty_endpoint_sends_no_traces() {
        let cli =
            Cli::try_parse_from(["chiasm", "serve", "m", "--otlp-traces-endpoint", ""]).unwrap();
        let Command::Serve(args) = cli.command else { panic!("serve") };
        assert!(args.traces.traces().unwrap().is_none());
    }

    #[test]
    fn invalid_trace_flag_is_refused_without_secrets() {
        for sample in ["1.5", "NaN"] {
            let error =
                Cli::try_parse_from(["chiasm", "serve", "m", "--otlp-traces-sample", sample])
                    .unwrap_err();
            assert!(error.to_string().contains("from 0 to 1"), "{error}");
        }
        let collector = "http://127.0.0.1:4318";
        for (endpoint, headers, expected) in [
            (
                "grpc://user:secret@127.0.0.1:4317",
                "",
                "--otlp-traces-endpoint: gRPC is not supported",
            ),
            ("secret@127.0.0.1:4318", "", "--otlp-traces-endpoint: expected an address"),
            (collector, "authorization: secret", "--otlp-traces-headers: expected NAME=VALUE"),
        ] {
            let flags = ["--otlp-traces-endpoint", endpoint, "--otlp-traces-headers", headers];
            let cli =
                Cli::try_parse_from([&["chiasm", "serve", "m"][..], &flags].concat()).unwrap();
            let Command::Serve(args) = cli.command else { panic!("serve") };
            let error = args.traces.traces().err().unwrap().to_string();
            assert!(error.starts_with(expected) && !error.contains("secret"), "{error}");
        }
    }
}
