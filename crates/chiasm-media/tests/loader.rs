//! Tests of the loader's public interface: every kind of URL, one identity.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chiasm_media::{
    ByteBudget, ContentHash, EncodedMedia, Fault, ImageFormat, ImageHeader, ImageLimits,
    MediaConfig, MediaError, MediaHeader, MediaInput, MediaLimits, MediaLoader, MediaPart,
};
use chiasm_types::Modality;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

fn goldens() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "goldens"].iter().collect()
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(goldens().join(name)).unwrap()
}

fn data_uri(bytes: &[u8]) -> String {
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(bytes))
}

fn header(item: &EncodedMedia) -> ImageHeader {
    let MediaHeader::Image(header) = item.header else { panic!("{item:?} is not an image") };
    header
}

/// Returns an unlimited budget.
fn budget() -> ByteBudget {
    ByteBudget::new(u64::MAX)
}

/// Returns a loader that may read files below `allowed`, and fetch from this machine.
fn loader(allowed: Option<&Path>) -> MediaLoader {
    let config = MediaConfig {
        allowed_local_media_path: allowed.map(Path::to_owned),
        allow_private_addresses: true,
        ..MediaConfig::default()
    };
    MediaLoader::new(config, budget()).unwrap()
}

#[tokio::test]
async fn bare_base64_equals_data_url() {
    let loader = loader(None);
    let bytes = file("png-rgba16-37x23.png");
    let open_base64 = |text: String| {
        let source = Some(MediaInput::Base64(text.into()));
        loader.open(MediaPart { source, name: None, modality: Modality::Image })
    };
    let from_url = loader.open(data_uri(&bytes)).await.unwrap();
    let from_base64 = open_base64(BASE64_STANDARD.encode(&bytes)).await.unwrap();
    assert_eq!(from_base64.content, from_url.content);
    assert_eq!(header(&from_base64), header(&from_url));
    for malformed in [data_uri(&bytes), "QR".to_owned(), "Q UJD".to_owned()] {
        let outcome = open_base64(malformed).await;
        assert!(matches!(outcome, Err(MediaError::InvalidDataUri { .. })));
    }
}

#[tokio::test]
async fn file_has_one_identity_from_every_source() {
    let bytes = file("png-rgba16-37x23.png");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let http = format!("http://{}/x.png", listener.local_addr().unwrap());
    let body = bytes.clone();
    let origin = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(&[answer.as_bytes(), &body].concat()).await.unwrap();
    });
    let local = format!("file://{}/png-rgba16-37x23.png", goldens().display());
    let loader = loader(Some(&goldens()));
    for url in [data_uri(&bytes), http, local] {
        let image = loader.open(&url).await.unwrap();
        assert_eq!(image.bytes, bytes);
        assert_eq!(image.content, ContentHash::digest(&bytes));
        assert_eq!(image.modality, Modality::Image);
        let header = header(&image);
        assert_eq!(
            (header.format, header.width, header.height, header.orientation),
            (ImageFormat::Png, 37, 23, 1)
        );
    }
    origin.await.unwrap();
}

#[tokio::test]
async fn large_data_url_is_loaded() {
    let mut bytes = file("jpeg-420-37x23.jpg");
    bytes.resize(3 << 20, 0);
    let image = loader(None).open(&data_uri(&bytes)).await.unwrap();
    assert_eq!((image.bytes.len(), header(&image).width), (3 << 20, 37));
}

#[tokio::test]
async fn local_files_are_off_by_default() {
    let error = MediaLoader::new(MediaConfig::default(), budget())
        .unwrap()
        .open("file:///etc/hostname")
        .await
        .unwrap_err();
    assert_eq!(error, MediaError::LocalFilesDisabled);
    assert_eq!(error.fault(), Fault::Forbidden);
}

#[tokio::test]
async fn invalid_media_url_is_refused_without_echo() {
    let loader = loader(None);
    for (url, fault) in [
        ("", Fault::BadRequest),
        ("secret", Fault::BadRequest),
        ("ftp://secret/x", Fault::BadRequest),
        ("javascript:secret", Fault::BadRequest),
        ("http://", Fault::BadRequest),
        ("http://secret secret/", Fault::BadRequest),
        ("http://u:secret@127.0.0.1/", Fault::BadRequest),
        ("data:secret", Fault::BadRequest),
        ("data:image/png,secret", Fault::BadRequest),
        ("data:image/png;base64,!secret!", Fault::BadRequest),
        ("data:image/png;base64,c2VjcmV0", Fault::Unsupported),
    ] {
        let error = loader.open(url).await.unwrap_err();
        assert_eq!(error.fault(), fault, "{url}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[tokio::test]
async fn limits_apply_to_every_kind_of_url() {
    let limits = |image| MediaLimits { image, ..MediaLimits::default() };
    let byte_limits = limits(ImageLimits { max_bytes: 100, ..ImageLimits::default() });
    let config = MediaConfig {
        limits: byte_limits,
        allowed_local_media_path: Some(goldens()),
        ..MediaConfig::default()
    };
    let loader = MediaLoader::new(config, budget()).unwrap();
    let bytes = file("jpeg-420-37x23.jpg");
    for url in [data_uri(&bytes), format!("file://{}/jpeg-420-37x23.jpg", goldens().display())] {
        assert_eq!(loader.open(&url).await.unwrap_err(), MediaError::TooManyBytes { limit: 100 });
    }
    let pixel_limits = limits(ImageLimits { max_pixels: 10, ..ImageLimits::default() });
    let config = MediaConfig { limits: pixel_limits, ..MediaConfig::default() };
    let loader = MediaLoader::new(config, budget()).unwrap();
    assert_eq!(loader.open(&data_uri(&bytes)).await.unwrap_err().fault(), Fault::TooLarge);
}

#[tokio::test]
async fn missing_local_directory_is_refused_at_creation() {
    let missing = goldens().join("missing");
    let config = MediaConfig { allowed_local_media_path: Some(missing), ..MediaConfig::default() };
    assert!(MediaLoader::new(config, budget()).is_err());
}

#[tokio::test]
async fn fetches_run_on_dedicated_threads() {
    use std::io::{Read, Write};
    use std::sync::mpsc::channel;
    use std::time::Duration;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/x.png", listener.local_addr().unwrap());
    let body = file("png-rgba16-37x23.png");
    let (request_sent, request_received) = channel();
    let expected = ContentHash::digest(&body);
    let origin = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        request_sent.send(()).unwrap();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(&[head.as_bytes(), &body].concat()).unwrap();
        // Waits until the client disconnects.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let loader = loader(None);
    let mut opening = Box::pin(loader.open(url));
    let first_poll =
        std::future::poll_fn(|context| std::task::Poll::Ready(opening.as_mut().poll(context)))
            .await;
    assert!(first_poll.is_pending());
    // Blocks the only thread of the test's runtime while the request is sent.
    request_received.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(opening.await.unwrap().content, expected);
    drop(loader);
    origin.join().unwrap();
}
