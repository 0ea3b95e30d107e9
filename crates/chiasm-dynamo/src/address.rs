use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use chiasm_backend::TensorFormat;
use chiasm_discovery::{DiscoveryError, Etcd};

use chiasm_types::Dtype;

use crate::call_home::CallHome;

/// The namespace of workers that were not told another one.
const DEFAULT_NAMESPACE: &str = "dynamo";
const LONGEST_NAMESPACE: usize = 128;

/// Where workers of Dynamo are named, and how they call back:
/// `dynamo+etcd://host:2379/namespace,model=m,listen=10.0.0.1:7000`, or
/// `dynamo+file:///folder/namespace`.
#[derive(Clone, PartialEq, Eq)]
pub struct DynamoAddress {
    pub(crate) named_in: NamedIn,
    pub(crate) namespace: String,
    /// The name of the model whose workers are served, whatever its files are.
    pub(crate) model: Option<String>,
    /// Whether its workers take images, which they don't tell themselves.
    images: bool,
    /// Whether those of this machine are given images as tensors.
    tensors: Option<TensorsFor>,
    /// Where workers are listened to.
    pub(crate) listen: Option<SocketAddr>,
    /// The address that workers are told to call, if it is not that one.
    pub(crate) announce: Option<SocketAddr>,
    text: String,
}

/// Whose tensors workers are given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorsFor {
    /// Those that the vLLM takes which their version of Dynamo asks for.
    OwnVllm,
    /// These, whatever vLLM it is.
    Any(TensorFormat),
}

impl TensorsFor {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "raw" => Some(Self::Any(TensorFormat::Raw)),
            text => match Dtype::from_torch_name(text)? {
                dtype @ (Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
                    Some(Self::Any(TensorFormat::Normalized(dtype)))
                }
                _ => None,
            },
        }
    }
}

/// What names workers.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum NamedIn {
    /// An etcd.
    Etcd(Etcd),
    /// Files of a folder.
    Folder(PathBuf),
}

/// A text is no address of workers of Dynamo.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// It begins with something else.
    #[error(
        "expected dynamo+etcd://HOST:PORT/NAMESPACE, dynamo+etcds://… or dynamo+file:///FOLDER/NAMESPACE"
    )]
    Scheme,
    /// Its folder is none.
    #[error(
        "expected dynamo+file:///FOLDER/NAMESPACE, with the whole path of the folder that workers have as DYN_FILE_KV"
    )]
    Folder,
    /// The servers of etcd are none.
    #[error("{0}")]
    Etcd(String),
    /// The namespace is none.
    #[error("'{0}' is no namespace of Dynamo: letters, digits, '-', '_' and '.'")]
    Namespace(String),
    /// It has an option that is not known.
    #[error(
        "'{0}' is no option: model=NAME, images, tensors, tensors=TYPE (raw, bfloat16, float16 or float32), listen=IP:PORT and announce=IP:PORT are"
    )]
    Option(String),
    /// Workers are told an address at which nobody listens.
    #[error("announce= needs listen=, the address of this machine that it leads to")]
    AnnouncesNothing,
}

impl DynamoAddress {
    /// Whether the operator says that its workers take images.
    pub fn takes_images(&self) -> bool {
        self.images
    }

    /// Whether the operator says that its workers on this machine take images as tensors, and
    /// which.
    pub fn tensors(&self) -> Option<TensorsFor> {
        self.tensors
    }

    /// Where its workers call back.
    pub fn call_home(&self) -> CallHome {
        CallHome::new(self.listen, self.announce)
    }
}

impl FromStr for DynamoAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let url = text.strip_prefix("dynamo+").ok_or(AddressError::Scheme)?;
        let (scheme, rest) = url.split_once("://").ok_or(AddressError::Scheme)?;
        let (named_in, place, rest) = match scheme {
            "etcd" | "etcds" => {
                let (servers, rest) = rest.split_once('/').unwrap_or((rest, ""));
                let etcd = format!("{scheme}://{servers}").parse();
                let etcd =
                    etcd.map_err(|error: DiscoveryError| AddressError::Etcd(error.to_string()))?;
                (NamedIn::Etcd(etcd), servers, rest)
            }
            "file" => {
                let folder = rest
                    .split(',')
                    .next()
                    .and_then(|path| path.rsplit_once('/'))
                    .map(|(folder, _)| folder);
                let folder =
                    folder.filter(|folder| folder.starts_with('/')).ok_or(AddressError::Folder)?;
                (NamedIn::Folder(folder.into()), folder, &rest[folder.len() + 1..])
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
        if namespace.len() > LONGEST_NAMESPACE || !namespace.bytes().all(is_plain) {
            return Err(AddressError::Namespace(
                namespace.chars().take(LONGEST_NAMESPACE).collect(),
            ));
        }
        let text = format!("dynamo+{scheme}://{place}/{namespace}");
        let mut address = Self {
            named_in,
            namespace: namespace.to_owned(),
            model: None,
            images: false,
            tensors: None,
            listen: None,
            announce: None,
            text,
        };
        for option in parts {
            let wrong = || AddressError::Option(option.to_owned());
            let place = |value: &str| value.parse::<SocketAddr>().map(Some).map_err(|_| wrong());
            match option.split_once('=') {
                None if option == "images" => address.images = true,
                // Who takes tensors takes images.
                None if option == "tensors" => {
                    (address.images, address.tensors) = (true, Some(TensorsFor::OwnVllm));
                }
                Some(("tensors", value)) => {
                    (address.images, address.tensors) =
                        (true, Some(TensorsFor::parse(value).ok_or_else(wrong)?));
                }
                Some(("model", name)) if !name.is_empty() => address.model = Some(name.to_owned()),
                Some(("listen", value)) => address.listen = place(value)?,
                Some(("announce", value)) => address.announce = place(value)?,
                _ => return Err(wrong()),
            }
        }
        match (address.announce, address.listen) {
            (Some(_), None) => Err(AddressError::AnnouncesNothing),
            _ => Ok(address),
        }
    }
}

impl fmt::Display for DynamoAddress {
    /// The servers or the folder, and the namespace alone.
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
    fn an_address_has_servers_a_namespace_and_options() {
        let parsed: DynamoAddress =
            "dynamo+etcd://a:1,b:2/ns,model=org/m,images,listen=0.0.0.0:7000,announce=10.0.0.1:7001".parse().unwrap();
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
    fn who_takes_tensors_takes_images() {
        let of = |options: &str| {
            let address: DynamoAddress = format!("dynamo+etcd://a:1/ns{options}").parse().unwrap();
            (address.takes_images(), address.tensors())
        };
        let floats = TensorsFor::Any(TensorFormat::Normalized(Dtype::BF16));
        assert_eq!(of(""), (false, None));
        assert_eq!(of(",images"), (true, None));
        assert_eq!(of(",tensors"), (true, Some(TensorsFor::OwnVllm)));
        assert_eq!(of(",tensors=raw,images"), (true, Some(TensorsFor::Any(TensorFormat::Raw))));
        assert_eq!(of(",tensors=bfloat16"), (true, Some(floats)));
    }

    #[test]
    fn a_folder_is_named_with_its_whole_path() {
        let parsed: DynamoAddress =
            "dynamo+file:///var/dynamo/ns,images,model=org/m".parse().unwrap();
        assert!(
            matches!(&parsed.named_in, NamedIn::Folder(folder) if folder.as_path() == Path::new("/var/dynamo"))
        );
        assert_eq!((parsed.namespace.as_str(), parsed.model.as_deref()), ("ns", Some("org/m")));
        assert_eq!(parsed.to_string(), "dynamo+file:///var/dynamo/ns");
        assert_eq!(
            "dynamo+file:///var/dynamo/".parse::<DynamoAddress>().unwrap().namespace,
            "dynamo"
        );
    }

    #[test]
    fn what_is_none_is_said_to_be_so() {
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
