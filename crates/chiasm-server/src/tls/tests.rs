use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, CertifiedKey, IsCa, KeyPair};
use tempfile::TempDir;

use super::*;

/// A certificate for `localhost` that was made just now, in the files of a folder of its own.
pub(crate) struct Made {
    pub(crate) folder: TempDir,
    /// The authority that has to be trusted.
    pub(crate) root: CertificateDer<'static>,
}

impl Made {
    /// One that proves itself.
    pub(crate) fn alone() -> Self {
        let CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        Self::write(&cert.pem(), &signing_key.serialize_pem(), cert.der().clone())
    }

    /// One that an authority signed which another one signed.
    pub(crate) fn chain() -> Self {
        let authority = || {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            (params, KeyPair::generate().unwrap())
        };
        let (params, key) = authority();
        let root = CertifiedIssuer::self_signed(params, key).unwrap();
        let (params, key) = authority();
        let between = CertifiedIssuer::signed_by(params, key, &root).unwrap();
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(["localhost".to_owned()])
            .unwrap()
            .signed_by(&key, &between)
            .unwrap();
        let chain = own.pem() + &between.as_ref().pem();
        Self::write(&chain, &key.serialize_pem(), root.as_ref().der().clone())
    }

    fn write(chain: &str, key: &str, root: CertificateDer<'static>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("chain.pem"), chain).unwrap();
        fs::write(folder.path().join("key.pem"), key).unwrap();
        Self { folder, root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn load(&self) -> Result<Certificate, CertificateError> {
        Certificate::load(self.path("chain.pem"), self.path("key.pem"))
    }

    /// Puts another one's file into the place of this one's.
    fn take(&self, name: &str, other: &Self) {
        fs::copy(other.path(name), self.path(name)).unwrap();
    }
}

fn tls(certificate: &Certificate) -> Arc<ServerConfig> {
    certificate.current()
}

#[tokio::test]
async fn files_that_change_are_taken_when_they_fit() {
    let (made, other) = (Made::alone(), Made::chain());
    let certificate = made.load().unwrap();
    let first = tls(&certificate);
    assert_eq!(first.alpn_protocols, [b"http/1.1"]);
    assert!(!certificate.reload().await.unwrap());
    // The files are exchanged one after the other.
    made.take("chain.pem", &other);
    let told = certificate.reload().await.unwrap_err().to_string();
    assert!(
        told.contains("chain.pem") && told.contains("key.pem") && told.contains("can't be served"),
        "{told}"
    );
    fs::remove_file(made.path("key.pem")).unwrap();
    assert!(matches!(certificate.reload().await, Err(CertificateError::File { .. })));
    assert!(Arc::ptr_eq(&first, &tls(&certificate)), "the old one stays");
    made.take("key.pem", &other);
    assert!(certificate.reload().await.unwrap());
    assert!(!Arc::ptr_eq(&first, &tls(&certificate)));
    assert!(!certificate.reload().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn files_are_looked_at_again_and_again() {
    let (made, other) = (Made::alone(), Made::alone());
    let certificate = made.load().unwrap();
    for (from, name) in [(&other, "chain.pem"), (&other, "key.pem")] {
        made.take(name, from);
        // Longer than it takes to look twice.
        let looked = tokio::time::timeout(3 * LOOK_EVERY, certificate.follow()).await;
        assert!(looked.is_err(), "it never ends");
    }
    assert!(!certificate.reload().await.unwrap(), "it was seen");
}

#[test]
fn what_can_t_be_served_is_told_with_its_file() {
    let (made, other) = (Made::alone(), Made::alone());
    let key = fs::read_to_string(other.path("key.pem")).unwrap();
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (name, content, told) in [
        ("chain.pem", String::new(), "chain.pem has no chain"),
        ("chain.pem", key.clone(), "chain.pem has no chain"),
        ("chain.pem", "-----BEGIN CERTIFICATE-----\nAA".to_owned(), "chain.pem has no chain"),
        ("chain.pem", broken.to_owned(), "chain.pem and the key"),
        ("chain.pem", " ".repeat(MOST as usize + 1), "chain.pem is no file of at most 1 MiB"),
        ("key.pem", "no key".to_owned(), "key.pem has no private key"),
        ("key.pem", key.replace("PRIVATE", "ENCRYPTED PRIVATE"), "key.pem has no private key"),
        (
            "key.pem",
            key.replace("-----BEGIN PRIVATE KEY-----\nM", "-----BEGIN PRIVATE KEY-----\nN"),
            "can't be served",
        ),
        ("key.pem", key.clone(), "can't be served"),
    ] {
        let before = fs::read(made.path(name)).unwrap();
        fs::write(made.path(name), &content).unwrap();
        let error = made.load().unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
        fs::write(made.path(name), before).unwrap();
    }
    made.load().unwrap();
    let error =
        Certificate::load(made.path("none.pem"), made.path("key.pem")).unwrap_err().to_string();
    assert!(error.contains("none.pem: "), "{error}");
    let error = Certificate::load(made.folder.path().to_owned(), made.path("key.pem"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("is no file"), "{error}");
}
