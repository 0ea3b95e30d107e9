//! The address of Dynamo's workers on the command line: registry, namespace and options.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use chiasm_backend::TensorFormat;
use chiasm_discovery::{DiscoveryError, Etcd};
use chiasm_types::Dtype;

use crate::response_listener::ResponseListener;

/// The namespace of workers that were started without another one.
const DEFAULT_NAMESPACE: &str = "dynamo";
const MAX_NAMESPACE_BYTES: usize = 128;

/// The registry, namespace and options of Dynamo's workers:
/// `dynamo+etcd://host:2379/namespace,model=m,listen=10.0.0.1:7000`, or
/// `dynamo+file:///folder/namespace`.
#[derive(Clone, PartialEq, Eq)]
pub struct DynamoAddress {
    pub(crate) registry: Registry,
    pub(crate) namespace: String,
    /// The name of the model whose workers are used, regardless of the model's files.
    pub(crate) model: Option<String>,
    /// `true` if the workers accept images, which they do not report themselves.
    images: bool,
    /// The tensors of images for workers on this machine, if they get any.
    tensors: Option<TensorSetting>,
    /// The address for connections from workers.
    pub(crate) listen: Option<SocketAddr>,
    /// The address that workers connect to, if it differs from `listen`.
    pub(crate) announce: Option<SocketAddr>,
    text: String,
}

/// The format of the image tensors that workers get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorSetting {
    /// The format of the vLLM version that the workers' version of Dynamo depends on.
    VersionDefault,
    /// This format, for any version of vLLM.
    Format(TensorFormat),
}

impl TensorSetting {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "raw" => Some(Self::Format(TensorFormat::Raw)),
            text => match Dtype::from_torch_name(text)? {
                dtype @ (Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
                    Some(Self::Format(TensorFormat::Normalized(dtype)))
                }
                _ => None,
            },
        }
    }
}

/// The registry in which workers are listed.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Registry {
    /// An etcd.
    Etcd(Etcd),
    /// The files of a folder.
    Folder(PathBuf),
}

/// An error of parsing a [`DynamoAddress`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// The address has an unknown scheme.
    #[error(
        "expected dynamo+etcd://HOST:PORT/NAMESPACE, dynamo+etcds://… or \
         dynamo+file:///FOLDER/NAMESPACE"
    )]
    Scheme,
    /// The address has no absolute path of a folder.
    #[error(
        "expected dynamo+file:///FOLDER/NAMESPACE, where FOLDER is the absolute path of the \
         workers' DYN_FILE_KV"
    )]
    Folder,
    /// The etcd servers are malformed.
    #[error("{0}")]
    Etcd(String),
    /// The namespace is malformed.
    #[error("'{0}' is not a Dynamo namespace: use letters, digits, '-', '_' and '.'")]
    Namespace(String),
    /// The address has an unknown option.
    #[error(
        "'{0}' is not an option: use model=NAME, images, tensors, tensors=TYPE (raw, bfloat16, \
         float16 or float32), listen=IP:PORT and announce=IP:PORT"
    )]
    Option(String),
    /// Workers would connect to an address without a listener.
    #[error("announce= requires listen=, the address of this machine behind it")]
    AnnouncesNothing,
}

impl DynamoAddress {
    /// Returns `true` if the operator states that the workers accept images.
    pub fn takes_images(&self) -> bool {
        self.images
    }

    /// Returns the format of the image tensors for workers on this machine, if the operator enables
    /// tensors.
    pub fn tensors(&self) -> Option<TensorSetting> {
        self.tensors
    }

    /// Creates the listener for the workers' answers.
    pub fn response_listener(&self) -> ResponseListener {
        ResponseListener::new(self.listen, self.announce)
    }
}

impl FromStr for DynamoAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let url = text.strip_prefix("dynamo+").ok_or(AddressError::Scheme)?;
        let (scheme, rest) = url.split_once("://").ok_or(AddressError::Scheme)?;
        let (registry, location, rest) = match scheme {
            "etcd" | "etcds" => {
                let (servers, rest) = rest.split_once('/').unwrap_or((rest, ""));
                let etcd = format!("{scheme}://{servers}").parse();
                let etcd =
                    etcd.map_err(|error: DiscoveryError| AddressError::Etcd(error.to_string()))?;
                (Registry::Etcd(etcd), servers, rest)
            }
            "file" => {
                let folder = rest
                    .split(',')
                    .next()
                    .and_then(|path| path.rsplit_once('/'))
                    .map(|(folder, _)| folder);
                let folder =
                    folder.filter(|folder| folder.starts_with('/')).ok_or(AddressError::Folder)?;
                (Registry::Folder(folder.into()), folder, &rest[folder.len() + 1..])
            }
            _ => return Err(AddressError::Scheme),
        };
        let mut parts = rest.split(',');
        let namespace = match parts.next().unwrap_or_default().trim_end_matches('/') {
            "" => DEFAULT_NAMESPACE,
            namespace => namespace,
        };
        let is_plain =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if namespace.len() > MAX_NAMESPACE_BYTES || !namespace.bytes().all(is_plain) {
            return Err(AddressError::Namespace(
                namespace.chars().take(MAX_NAMESPACE_BYTES).collect(),
            ));
        }
        let text = format!("dynamo+{scheme}://{location}/{namespace}");
        let mut address = Self {
            registry,
            namespace: namespace.to_owned(),
            model: None,
            images: false,
            tensors: None,
            listen: None,
            announce: None,
            text,
        };
        for option in parts {
            let invalid = || AddressError::Option(option.to_owned());
            let socket = |value: &str| value.parse::<SocketAddr>().map(Some).map_err(|_| invalid());
            match option.split_once('=') {
                None if option == "images" => address.images = true,
                // A worker that accepts tensors also accepts images.
                None if option == "tensors" => {
                    address.images = true;
                    address.tensors = Some(TensorSetting::VersionDefault);
                }
                Some(("tensors", value)) => {
                    address.images = true;
                    address.tensors = Some(TensorSetting::parse(value).ok_or_else(invalid)?);
                }
                Some(("model", name)) if !name.is_empty() => address.model = Some(name.to_owned()),
                Some(("listen", value)) => address.listen = socket(value)?,
                Some(("announce", value)) => address.announce = socket(value)?,
                _ => return Err(invalid()),
            }
        }
        if address.announce.is_some() && address.listen.is_none() {
            return Err(AddressError::AnnouncesNothing);
        }
        Ok(address)
    }
}

impl fmt::Display for DynamoAddress {
    /// Writes the servers or the folder, and the namespace, without the options.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for DynamoAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DynamoAddress({self})")
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn address_with_options_is_parsed() {
        let text = "dynamo+etcd://a:1,b:2/ns,model=org/m,images,listen=0.0.0.0:7000,\
                    announce=10.0.0.1:7001";
        let parsed: DynamoAddress = text.parse().unwrap();
        assert_eq!(
            (parsed.to_string().as_str(), parsed.namespace.as_str()),
            ("dynamo+etcd://a:1,b:2/ns", "ns")
        );
        assert_eq!((parsed.model.as_deref(), parsed.takes_images()), (Some("org/m"), true));
        assert_eq!(parsed.listen, Some("0.0.0.0:7000".parse().unwrap()));
        assert_eq!(parsed.announce, Some("10.0.0.1:7001".parse().unwrap()));
        for default in ["dynamo+etcds://a:1", "dynamo+etcds://a:1/", "dynamo+etcds://a:1/dynamo/"] {
            assert_eq!(
                default.parse::<DynamoAddress>().unwrap().to_string(),
                "dynamo+etcds://a:1/dynamo"
            );
        }
    }

    #[test]
    fn tensors_option_implies_images() {
        let media = |options: &str| {
            let address: DynamoAddress = format!("dynamo+etcd://a:1/ns{options}").parse().unwrap();
            (address.takes_images(), address.tensors())
        };
        let floats = TensorSetting::Format(TensorFormat::Normalized(Dtype::BF16));
        let raw = TensorSetting::Format(TensorFormat::Raw);
        assert_eq!(media(""), (false, None));
        assert_eq!(media(",images"), (true, None));
        assert_eq!(media(",tensors"), (true, Some(TensorSetting::VersionDefault)));
        assert_eq!(media(",tensors=raw,images"), (true, Some(raw)));
        assert_eq!(media(",tensors=bfloat16"), (true, Some(floats)));
    }

    #[test]
    fn folder_address_is_parsed() {
        let parsed: DynamoAddress =
            "dynamo+file:///var/dynamo/ns,images,model=org/m".parse().unwrap();
        let Registry::Folder(folder) = &parsed.registry else { panic!("a folder") };
        assert_eq!(folder.as_path(), Path::new("/var/dynamo"));
        assert_eq!((parsed.namespace.as_str(), parsed.model.as_deref()), ("ns", Some("org/m")));
        assert_eq!(parsed.to_string(), "dynamo+file:///var/dynamo/ns");
        assert_eq!(
            "dynamo+file:///var/dynamo/".parse::<DynamoAddress>().unwrap().namespace,
            "dynamo"
        );
    }

    #[test]
    fn invalid_address_is_refused_with_its_fault() {
        let option = |text: &str| AddressError::Option(text.to_owned());
        for (text, error) in [
            ("etcd://a:1/ns", AddressError::Scheme),
            ("dynamo+nats://a:1", AddressError::Scheme),
            ("dynamo+file://tmp/x", AddressError::Folder),
            ("dynamo+file://", AddressError::Folder),
            ("dynamo+file:///x", AddressError::Folder),
            ("dynamo+file:///tmp/x,images=1", option("images=1")),
            ("dynamo+etcd://a:1/n s", AddressError::Namespace("n s".to_owned())),
            ("dynamo+etcd://a:1/a/b", AddressError::Namespace("a/b".to_owned())),
            ("dynamo+etcd://a:1/ns,model=", option("model=")),
            ("dynamo+etcd://a:1/ns,listen=7000", option("listen=7000")),
            ("dynamo+etcd://a:1/ns,port=1", option("port=1")),
            ("dynamo+etcd://a:1/ns,images=yes", option("images=yes")),
            ("dynamo+etcd://a:1/ns,tensors=int8", option("tensors=int8")),
            ("dynamo+etcd://a:1/ns,announce=10.0.0.1:1", AddressError::AnnouncesNothing),
        ] {
            assert_eq!(text.parse::<DynamoAddress>(), Err(error), "{text}");
        }
        let error = "dynamo+etcd://a".parse::<DynamoAddress>().unwrap_err().to_string();
        assert!(error.contains("host:port"), "{error}");
    }
}
