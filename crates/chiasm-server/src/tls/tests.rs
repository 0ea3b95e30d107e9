use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, CertifiedKey, IsCa, KeyPair};
use tempfile::TempDir;

use super::*;

/// A newly generated certificate for `localhost`, in files in a temporary folder.
pub(crate) struct TestCertificate {
    pub(crate) folder: TempDir,
    /// The root certificate that clients have to trust.
    pub(crate) root: CertificateDer<'static>,
}

impl TestCertificate {
    /// Generates a self-signed certificate.
    pub(crate) fn self_signed() -> Self {
        let CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        Self::write(&cert.pem(), &signing_key.serialize_pem(), cert.der().clone())
    }

    /// Generates a certificate signed by an intermediate authority, which a root authority signed.
    pub(crate) fn chain() -> Self {
        let authority = || {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            (params, KeyPair::generate().unwrap())
        };
        let (params, key) = authority();
        let root = CertifiedIssuer::self_signed(params, key).unwrap();
        let (params, key) = authority();
        let intermediate = CertifiedIssuer::signed_by(params, key, &root).unwrap();
        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(["localhost".to_owned()])
            .unwrap()
            .signed_by(&key, &intermediate)
            .unwrap();
        let chain = own.pem() + &intermediate.as_ref().pem();
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

    /// Replaces a file by that of another certificate.
    fn replace_file(&self, name: &str, other: &Self) {
        fs::copy(other.path(name), self.path(name)).unwrap();
    }
}

fn tls(certificate: &Certificate) -> Arc<ServerConfig> {
    certificate.current()
}

#[tokio::test]
async fn changed_files_are_loaded_once_they_match() {
    let files = TestCertificate::self_signed();
    let other = TestCertificate::chain();
    let certificate = files.load().unwrap();
    let first = tls(&certificate);
    assert_eq!(first.alpn_protocols, [b"http/1.1"]);
    assert!(!certificate.reload().await.unwrap());
    // The files are exchanged one after the other.
    files.replace_file("chain.pem", &other);
    let error = certificate.reload().await.unwrap_err().to_string();
    assert!(
        error.contains("chain.pem") && error.contains("key.pem") && error.contains("can't be used"),
        "{error}"
    );
    fs::remove_file(files.path("key.pem")).unwrap();
    assert!(matches!(certificate.reload().await, Err(CertificateError::File { .. })));
    assert!(Arc::ptr_eq(&first, &tls(&certificate)), "the old certificate stays");
    files.replace_file("key.pem", &other);
    assert!(certificate.reload().await.unwrap());
    assert!(!Arc::ptr_eq(&first, &tls(&certificate)));
    assert!(!certificate.reload().await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn follow_reloads_changed_files() {
    let files = TestCertificate::self_signed();
    let other = TestCertificate::self_signed();
    let certificate = files.load().unwrap();
    for (from, name) in [(&other, "chain.pem"), (&other, "key.pem")] {
        files.replace_file(name, from);
        // Long enough for two checks.
        let followed = tokio::time::timeout(3 * RELOAD_INTERVAL, certificate.follow()).await;
        assert!(followed.is_err(), "it never ends");
    }
    assert!(!certificate.reload().await.unwrap(), "the change was already loaded");
}

#[test]
fn certificate_errors_name_the_file() {
    let files = TestCertificate::self_signed();
    let other = TestCertificate::self_signed();
    let key = fs::read_to_string(other.path("key.pem")).unwrap();
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (name, content, expected) in [
        ("chain.pem", String::new(), "chain.pem has no chain"),
        ("chain.pem", key.clone(), "chain.pem has no chain"),
        ("chain.pem", "-----BEGIN CERTIFICATE-----\nAA".to_owned(), "chain.pem has no chain"),
        ("chain.pem", broken.to_owned(), "chain.pem and the key"),
        (
            "chain.pem",
            " ".repeat(MAX_FILE_BYTES as usize + 1),
            "chain.pem is not a regular file of at most 1 MiB",
        ),
        ("key.pem", "no key".to_owned(), "key.pem has no private key"),
        ("key.pem", key.replace("PRIVATE", "ENCRYPTED PRIVATE"), "key.pem has no private key"),
        (
            "key.pem",
            key.replace("-----BEGIN PRIVATE KEY-----\nM", "-----BEGIN PRIVATE KEY-----\nN"),
            "can't be used",
        ),
        ("key.pem", key.clone(), "can't be used"),
    ] {
        let before = fs::read(files.path(name)).unwrap();
        fs::write(files.path(name), &content).unwrap();
        let error = files.load().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        fs::write(files.path(name), before).unwrap();
    }
    files.load().unwrap();
    let error =
        Certificate::load(files.path("none.pem"), files.path("key.pem")).unwrap_err().to_string();
    assert!(error.contains("none.pem: "), "{error}");
    let error = Certificate::load(files.folder.path().to_owned(), files.path("key.pem"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("is not a regular file"), "{error}");
}
