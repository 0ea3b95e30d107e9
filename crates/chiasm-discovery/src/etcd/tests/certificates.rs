//! A certificate authority for tests, and certificates that it signs, as files.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::{Identity, Tls};

pub(super) struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(super) fn new(folder: &Path) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        let authority = Self { folder: folder.to_owned(), issuer: Issuer::new(params, key) };
        std::fs::write(authority.file(), certificate.pem()).unwrap();
        authority
    }

    /// Returns the file of the authority's own certificate.
    pub(super) fn file(&self) -> PathBuf {
        self.folder.join("ca.pem")
    }

    /// Signs a certificate for `names` and writes it to files named after `file`.
    pub(super) fn sign(&self, file: &str, names: &[&str]) -> Identity {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let certificate =
            CertificateParams::new(names).unwrap().signed_by(&key, &self.issuer).unwrap();
        let identity = Identity {
            certificate: self.folder.join(format!("{file}.pem")),
            key: self.folder.join(format!("{file}.key")),
        };
        std::fs::write(&identity.certificate, certificate.pem()).unwrap();
        std::fs::write(&identity.key, key.serialize_pem()).unwrap();
        identity
    }

    /// Returns the TLS files of a client that trusts this authority and has a certificate for
    /// `name`.
    pub(super) fn tls(&self, name: &str) -> Tls {
        Tls { authority: Some(self.file()), identity: Some(self.sign(name, &[name])) }
    }
}
