//! Flags of HTTP: TLS, cross-origin requests, the root path and the live page. Most have vLLM's
//! names.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use chiasm_server::{AllowList, Certificate, Cors, CorsError, PageOptions, RootPath};
use clap::Args;

use crate::error::CliError;

#[derive(Debug, Args)]
pub(crate) struct HttpArgs {
    /// PEM file of the server's certificate and its chain, for HTTPS; read again when it changes
    #[arg(long, env = "CHIASM_SSL_CERTFILE", value_name = "FILE", requires = "ssl_keyfile")]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// PEM file of the private key of --ssl-certfile; read again when it changes
    #[arg(long, env = "CHIASM_SSL_KEYFILE", value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,
    /// Origins whose web pages may send requests (CORS), such as '["https://chat.example.com"]';
    /// '["*"]' for all [default: none]
    #[arg(long, env = "CHIASM_ALLOWED_ORIGINS", value_name = "JSON_LIST")]
    pub(crate) allowed_origins: Option<JsonList>,
    /// HTTP methods that pages of --allowed-origins may use [default: '["*"]']
    #[arg(
        long,
        env = "CHIASM_ALLOWED_METHODS",
        value_name = "JSON_LIST",
        requires = "allowed_origins"
    )]
    pub(crate) allowed_methods: Option<JsonList>,
    /// Headers that pages of --allowed-origins may send [default: '["*"]']
    #[arg(
        long,
        env = "CHIASM_ALLOWED_HEADERS",
        value_name = "JSON_LIST",
        requires = "allowed_origins"
    )]
    pub(crate) allowed_headers: Option<JsonList>,
    /// Let browsers send credentials, such as cookies, with requests of pages of --allowed-origins
    #[arg(long, env = "CHIASM_ALLOW_CREDENTIALS")]
    pub(crate) allow_credentials: bool,
    /// Path prefix below which a proxy serves this server, such as /models/qwen; requests may
    /// include or omit it
    #[arg(long, env = "CHIASM_ROOT_PATH", value_name = "PATH")]
    pub(crate) root_path: Option<RootPath>,
    /// Serve the live page at /ui/: on, off, or auto (on if --host is a loopback address). If there
    /// are API keys, the page needs one
    #[arg(
        long,
        env = "CHIASM_UI",
        value_name = "WHEN",
        default_value = "auto",
        default_missing_value = "on",
        num_args = 0..=1,
        require_equals = true
    )]
    pub(crate) ui: Ui,
}

/// The condition for serving the live page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Ui {
    Auto,
    On,
    Off,
}

/// A JSON list of strings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonList(Vec<String>);

/// The error of a value that is not a JSON list of strings.
#[derive(Debug, thiserror::Error)]
#[error("expected a JSON list of strings, such as '[\"*\"]': {0}")]
pub(crate) struct NotAList(#[from] serde_json::Error);

impl FromStr for JsonList {
    type Err = NotAList;

    fn from_str(text: &str) -> Result<Self, NotAList> {
        Ok(Self(serde_json::from_str(text)?))
    }
}

impl HttpArgs {
    /// Loads the certificate, if one is given.
    ///
    /// # Errors
    /// [`CliError::Usage`] if the files are invalid.
    pub(crate) fn certificate(&self) -> Result<Option<Arc<Certificate>>, CliError> {
        let (Some(certificate), Some(key)) = (&self.ssl_certfile, &self.ssl_keyfile) else {
            return Ok(None);
        };
        let certificate = Certificate::load(certificate.clone(), key.clone());
        let invalid = |error| CliError::Usage(format!("--ssl-certfile, --ssl-keyfile: {error}"));
        certificate.map(Arc::new).map(Some).map_err(invalid)
    }

    /// Returns the options of the live page, if it is served at this address.
    pub(crate) fn page(&self, host: IpAddr) -> Option<PageOptions> {
        let is_on = match self.ui {
            Ui::Auto => host.is_loopback(),
            Ui::On => true,
            Ui::Off => false,
        };
        is_on.then_some(PageOptions { secure: self.ssl_certfile.is_some() })
    }

    /// Returns the CORS settings, if any origin is allowed.
    ///
    /// # Errors
    /// [`CliError::Usage`] for an invalid origin, method or header name.
    pub(crate) fn cors(&self) -> Result<Option<Cors>, CliError> {
        let origins = self.allowed_origins.as_ref().map_or(&[][..], |JsonList(origins)| origins);
        if origins.is_empty() {
            // Not checked by clap: the environment variable may be set to `false`.
            if self.allow_credentials {
                let message = "--allow-credentials requires --allowed-origins";
                return Err(CliError::Usage(message.to_owned()));
            }
            return Ok(None);
        }
        let allow_list = |list: &Option<JsonList>| match list {
            Some(JsonList(names)) => AllowList::new(names.clone()),
            None => AllowList::All,
        };
        let origins = AllowList::new(origins.to_vec());
        let methods = allow_list(&self.allowed_methods);
        let headers = allow_list(&self.allowed_headers);
        let cors = Cors::new(origins, methods, headers, self.allow_credentials).map_err(|error| {
            let flag = match error {
                CorsError::Origin(_) => "--allowed-origins",
                CorsError::Method(_) => "--allowed-methods",
                CorsError::Header(_) => "--allowed-headers",
            };
            CliError::Usage(format!("{flag}: {error}"))
        });
        cors.map(Some)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse(flags: &[&str]) -> Result<HttpArgs, String> {
        let cli = Cli::try_parse_from([&["chiasm", "serve", "m"], flags].concat());
        match cli.map_err(|error| error.to_string())?.command {
            Command::Serve(args) => Ok(args.http),
            _ => panic!("serve"),
        }
    }

    fn cors(flags: &[&str]) -> Result<String, String> {
        let cors = parse(flags)?.cors().map_err(|error| error.to_string())?;
        Ok(format!("{cors:?}"))
    }

    #[test]
    fn dependent_flags_are_required_together() {
        for (flags, missing) in [
            (&["--ssl-certfile", "a"][..], "--ssl-keyfile"),
            (&["--ssl-keyfile", "a"], "--ssl-certfile"),
            (&["--allowed-methods", "[\"GET\"]"], "--allowed-origins"),
            (&["--allowed-headers", "[\"*\"]"], "--allowed-origins"),
        ] {
            let error = parse(flags).unwrap_err();
            assert!(error.contains("required") && error.contains(missing), "{error}");
        }
        let error = parse(&["--ssl-certfile", "/none", "--ssl-keyfile", "/none"])
            .unwrap()
            .certificate()
            .unwrap_err();
        assert!(error.to_string().starts_with("--ssl-certfile, --ssl-keyfile: /none: "), "{error}");
        assert!(parse(&[]).unwrap().certificate().unwrap().is_none());
    }

    #[test]
    fn cors_needs_allowed_origins() {
        assert_eq!(cors(&[]).unwrap(), "None");
        assert_eq!(cors(&["--allowed-origins", "[]"]).unwrap(), "None");
        let all = Cors::new(AllowList::All, AllowList::All, AllowList::All, false).unwrap();
        assert_eq!(cors(&["--allowed-origins", "[\"*\"]"]).unwrap(), format!("{:?}", Some(all)));
        let origin = "[\"https://a.example\"]";
        for (flags, expected) in [
            (
                &["--allowed-origins", "https://a.example"][..],
                "'--allowed-origins <JSON_LIST>': expected a JSON list",
            ),
            (&["--allowed-origins", "[1]"], "expected a JSON list"),
            (&["--allow-credentials"], "--allow-credentials requires --allowed-origins"),
            (
                &["--allowed-origins", "[\"https://a.example/\"]"],
                "--allowed-origins: 'https://a.example/' is not an origin",
            ),
            (
                &["--allowed-origins", origin, "--allowed-methods", "[\"\"]"],
                "--allowed-methods: '' is not an HTTP method",
            ),
            (
                &["--allowed-origins", origin, "--allowed-headers", "[\"a b\"]"],
                "--allowed-headers: 'a b' is not a header name",
            ),
        ] {
            let error = cors(flags).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn live_page_is_local_unless_enabled() {
        let shown = |flags: &[&str], host: &str| parse(flags).unwrap().page(host.parse().unwrap());
        let plain = Some(PageOptions { secure: false });
        assert_eq!(
            (shown(&[], "127.0.0.1"), shown(&[], "::1"), shown(&[], "0.0.0.0")),
            (plain, plain, None)
        );
        assert_eq!((shown(&["--ui"], "0.0.0.0"), shown(&["--ui=off"], "127.0.0.1")), (plain, None));
        let encrypted = shown(&["--ui", "--ssl-certfile", "a", "--ssl-keyfile", "b"], "0.0.0.0");
        assert_eq!(encrypted, Some(PageOptions { secure: true }));
    }

    #[test]
    fn root_path_must_be_path() {
        assert_eq!(parse(&["--root-path", "/a/"]).unwrap().root_path, Some("/a".parse().unwrap()));
        let error = parse(&["--root-path", "a"]).unwrap_err();
        assert!(error.contains("--root-path") && error.contains("expected a path"), "{error}");
    }
}
