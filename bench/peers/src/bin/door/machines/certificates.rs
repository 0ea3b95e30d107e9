//! An authority that lives as long as a run, and the certificate that all its programs show each
//! other.

use std::error::Error;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

const FOLDER: &str = "certificates";
const AUTHORITY: &str = "ca.pem";
const CERTIFICATE: &str = "all.pem";
const KEY: &str = "all.key";

/// Their files.
pub(crate) struct Certificates {
    pub(crate) folder: PathBuf,
}

impl Certificates {
    /// Makes them, below `folder`, for programs that listen on these hosts.
    pub(crate) fn new(folder: &Path, hosts: impl Iterator<Item = IpAddr>) -> Result<Self, Box<dyn Error>> {
        let folder = folder.join(FOLDER);
        fs::create_dir(&folder)?;
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        fs::write(folder.join(AUTHORITY), authority.self_signed(&key)?.pem())?;
        let issuer = Issuer::new(authority, key);
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(hosts.map(|host| host.to_string()).collect::<Vec<_>>())?;
        fs::write(folder.join(CERTIFICATE), certificate.signed_by(&key, &issuer)?.pem())?;
        fs::write(folder.join(KEY), key.serialize_pem())?;
        Ok(Self { folder })
    }

    /// The flags of a frontend or an agent.
    pub(crate) fn flags(&self) -> Vec<String> {
        let flags = [("--agent-certfile", CERTIFICATE), ("--agent-keyfile", KEY), ("--agent-ca-file", AUTHORITY)];
        flags
            .iter()
            .flat_map(|(flag, file)| [(*flag).to_owned(), self.folder.join(file).display().to_string()])
            .collect()
    }
}

/// The contents of such a folder: the authority, the certificate, its key.
pub(crate) fn read(folder: &Path) -> std::io::Result<[String; 3]> {
    let [authority, certificate, key] = [AUTHORITY, CERTIFICATE, KEY].map(|file| fs::read_to_string(folder.join(file)));
    Ok([authority?, certificate?, key?])
}
