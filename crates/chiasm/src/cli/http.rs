//! Flags that say how HTTP is spoken: within TLS, to pages of other web sites, below a path. They
//! have vLLM's names.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use chiasm_server::{Allowed, Certificate, Cors, CorsError, PageOptions, RootPath};
use clap::Args;

use crate::error::CliError;

#[derive(Debug, Args)]
pub(crate) struct HttpArgs {
    /// PEM file of the server's certificate and those that prove it, for HTTPS; read again when it
    /// changes
    #[arg(long, env = "CHIASM_SSL_CERTFILE", value_name = "FILE", requires = "ssl_keyfile")]
    pub(crate) ssl_certfile: Option<PathBuf>,
    /// PEM file of the certificate's private key; read again when it changes
    #[arg(long, env = "CHIASM_SSL_KEYFILE", value_name = "FILE", requires = "ssl_certfile")]
    pub(crate) ssl_keyfile: Option<PathBuf>,
    /// Web sites whose pages may ask (CORS), such as '["https://chat.example.com"]'; '["*"]' for
    /// all [default: none]
    #[arg(long, env = "CHIASM_ALLOWED_ORIGINS", value_name = "JSON_LIST")]
    pub(crate) allowed_origins: Option<JsonList>,
    /// Methods that they may use [default: '["*"]']
    #[arg(
        long,
        env = "CHIASM_ALLOWED_METHODS",
        value_name = "JSON_LIST",
        requires = "allowed_origins"
    )]
    pub(crate) allowed_methods: Option<JsonList>,
    /// Headers that they may send [default: '["*"]']
    #[arg(
        long,
        env = "CHIASM_ALLOWED_HEADERS",
        value_name = "JSON_LIST",
        requires = "allowed_origins"
    )]
    pub(crate) allowed_headers: Option<JsonList>,
    /// Let browsers send along what they have for this server, such as cookies
    #[arg(long, env = "CHIASM_ALLOW_CREDENTIALS")]
    pub(crate) allow_credentials: bool,
    /// Path below which a proxy serves this server, such as /models/qwen; requests may have it or
    /// not
    #[arg(long, env = "CHIASM_ROOT_PATH", value_name = "PATH")]
    pub(crate) root_path: Option<RootPath>,
    /// Show the live page at /ui/: on, off, or auto for where --host is an address of this machine
    /// alone. Who may see it needs one of the API keys, if there are any
    #[arg(long, env = "CHIASM_UI", value_name = "WHEN", default_value = "auto", default_missing_value = "on",
          num_args = 0..=1, require_equals = true)]
    pub(crate) ui: Ui,
}

/// When there is a live page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Ui {
    Auto,
    On,
    Off,
}

/// Names as a JSON list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonList(Vec<String>);

/// A value that is not a JSON list of strings.
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
    /// The certificate, if connections are to be encrypted.
    ///
    /// # Errors
    /// [`CliError::Usage`] if the files are not what they should be.
    pub(crate) fn certificate(&self) -> Result<Option<Arc<Certificate>>, CliError> {
        let (Some(certificate), Some(key)) = (&self.ssl_certfile, &self.ssl_keyfile) else {
            return Ok(None);
        };
        let certificate = Certificate::load(certificate.clone(), key.clone());
        let fault = |error| CliError::Usage(format!("--ssl-certfile, --ssl-keyfile: {error}"));
        certificate.map(Arc::new).map(Some).map_err(fault)
    }

    /// How the live page is shown at this address, if it is.
    pub(crate) fn page(&self, host: IpAddr) -> Option<PageOptions> {
        let is_on = match self.ui {
            Ui::Auto => host.is_loopback(),
            Ui::On => true,
            Ui::Off => false,
        };
        is_on.then_some(PageOptions { secure: self.ssl_certfile.is_some() })
    }

    /// Which pages may ask, if any may.
    ///
    /// # Errors
    /// [`CliError::Usage`] for a name that none can have.
    pub(crate) fn cors(&self) -> Result<Option<Cors>, CliError> {
        let origins = self.allowed_origins.as_ref().map_or(&[][..], |JsonList(origins)| origins);
        // RequestedSampling here, as the environment may say no.
        match (origins.is_empty(), self.allow_credentials) {
            (true, true) => {
                return Err(CliError::Usage(
                    "--allow-credentials needs --allowed-origins".to_owned(),
                ));
            }
            (true, false) => return Ok(None),
            (false, _) => {}
        }
        let allowed = |list: &Option<JsonList>| match list {
            Some(JsonList(names)) => Allowed::new(names.clone()),
            None => Allowed::All,
        };
        let origins = Allowed::new(origins.to_vec());
        let (methods, headers) = (allowed(&self.allowed_methods), allowed(&self.allowed_headers));
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
    fn flags_of_one_matter_come_together() {
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
    fn no_page_may_ask_unless_its_site_is_named() {
        assert_eq!(cors(&[]).unwrap(), "None");
        assert_eq!(cors(&["--allowed-origins", "[]"]).unwrap(), "None");
        let all = Cors::new(Allowed::All, Allowed::All, Allowed::All, false).unwrap();
        assert_eq!(cors(&["--allowed-origins", "[\"*\"]"]).unwrap(), format!("{:?}", Some(all)));
        let origin = "[\"https://a.example\"]";
        for (flags, told) in [
            (
                &["--allowed-origins", "https://a.example"][..],
                "'--allowed-origins <JSON_LIST>': expected a JSON list",
            ),
            (&["--allowed-origins", "[1]"], "expected a JSON list"),
            (&["--allow-credentials"], "--allow-credentials needs --allowed-origins"),
            (
                &["--allowed-origins", "[\"https://a.example/\"]"],
                "--allowed-origins: 'https://a.example/' is no origin",
            ),
            (
                &["--allowed-origins", origin, "--allowed-methods", "[\"\"]"],
                "--allowed-methods: '' is no method",
            ),
            (
                &["--allowed-origins", origin, "--allowed-headers", "[\"a b\"]"],
                "--allowed-headers: 'a b' is no header",
            ),
        ] {
            let error = cors(flags).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn the_live_page_is_for_this_machine_alone_unless_it_is_asked_for() {
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
    fn a_root_path_is_a_path() {
        assert_eq!(parse(&["--root-path", "/a/"]).unwrap().root_path, Some("/a".parse().unwrap()));
        let error = parse(&["--root-path", "a"]).unwrap_err();
        assert!(error.contains("--root-path") && error.contains("expected a path"), "{error}");
    }
}
