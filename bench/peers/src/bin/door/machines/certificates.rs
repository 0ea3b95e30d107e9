//! An authority of this run, and a certificate that all programs share.

use std::error::Error;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

const AUTHORITY: &str = "ca.pem";
const CERTIFICATE: &str = "all.pem";
const KEY: &str = "all.key";

/// The folder of the files.
pub(crate) struct Certificates {
    pub(crate) folder: PathBuf,
}

impl Certificates {
    /// Writes the files below `folder`, for programs that listen on these hosts.
    pub(crate) fn new(
        folder: &Path,
        hosts: impl Iterator<Item = IpAddr>,
    ) -> Result<Self, Box<dyn Error>> {
        let folder = folder.join("certificates");
        fs::create_dir(&folder)?;
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        fs::write(folder.join(AUTHORITY), authority.self_signed(&key)?.pem())?;
        let issuer = Issuer::new(authority, key);
        let key = KeyPair::generate()?;
        let hosts: Vec<String> = hosts.map(|host| host.to_string()).collect();
        let certificate = CertificateParams::new(hosts)?.signed_by(&key, &issuer)?;
        fs::write(folder.join(CERTIFICATE), certificate.pem())?;
        fs::write(folder.join(KEY), key.serialize_pem())?;
        Ok(Self { folder })
    }

    /// Returns the flags of a frontend or an agent.
    pub(crate) fn flags(&self) -> Vec<String> {
        let flags = [
            ("--agent-certfile", CERTIFICATE),
            ("--agent-keyfile", KEY),
            ("--agent-ca-file", AUTHORITY),
        ];
        let flags = flags
            .map(|(flag, file)| [flag.to_owned(), self.folder.join(file).display().to_string()]);
        flags.concat()
    }
}

/// Reads the authority, the certificate and its key.
pub(crate) fn read(folder: &Path) -> std::io::Result<[String; 3]> {
    let [authority, certificate, key] =
        [AUTHORITY, CERTIFICATE, KEY].map(|file| fs::read_to_string(folder.join(file)));
    Ok([authority?, certificate?, key?])
}
