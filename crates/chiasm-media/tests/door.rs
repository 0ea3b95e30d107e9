//! The door from outside: every kind of URL, one identity.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chiasm_media::{
    ByteBudget, ContentHash, EncodedMedia, Fault, ImageFormat, ImageHeader, ImageLimits,
    MediaConfig, MediaDoor, MediaError, MediaHeader, MediaInput, MediaLimits, MediaPart,
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
    let MediaHeader::Image(header) = item.header else { panic!("{item:?} is no image") };
    header
}

/// Room for everything.
fn budget() -> ByteBudget {
    ByteBudget::new(u64::MAX)
}

fn door(allowed: Option<&Path>) -> MediaDoor {
    let config = MediaConfig {
        allowed_local_media_path: allowed.map(Path::to_owned),
        allow_private_addresses: true,
        ..MediaConfig::default()
    };
    MediaDoor::new(config, budget()).unwrap()
}

#[tokio::test]
async fn base64_alone_is_the_same_as_in_a_data_url() {
    let (name, door) = ("png-rgba16-37x23.png", door(None));
    let open = |text: String| {
        let source = Some(MediaInput::Base64(text.into()));
        door.open(MediaPart { source, name: None, modality: Modality::Image })
    };
    let (bytes, in_url) = (file(name), door.open(data_uri(&file(name))).await.unwrap());
    let alone = open(BASE64_STANDARD.encode(&bytes)).await.unwrap();
    assert_eq!((alone.content, header(&alone)), (in_url.content, header(&in_url)));
    for wrong in [data_uri(&bytes), "QR".to_owned(), "Q UJD".to_owned()] {
        assert!(matches!(open(wrong).await, Err(MediaError::InvalidDataUri { .. })));
    }
}

#[tokio::test]
async fn the_same_file_has_one_identity_whichever_way_it_comes() {
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
    let door = door(Some(&goldens()));
    for url in [data_uri(&bytes), http, local] {
        let image = door.open(&url).await.unwrap();
        assert_eq!(image.bytes, bytes);
        assert_eq!(image.content, ContentHash::of(&bytes));
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
async fn large_data_uris_work_as_small_ones_do() {
    let mut bytes = file("jpeg-420-37x23.jpg");
    bytes.resize(3 << 20, 0);
    let image = door(None).open(&data_uri(&bytes)).await.unwrap();
    assert_eq!((image.bytes.len(), header(&image).width), (3 << 20, 37));
}

#[tokio::test]
async fn local_files_are_off_by_default() {
    let error = MediaDoor::new(MediaConfig::default(), budget())
        .unwrap()
        .open("file:///etc/hostname")
        .await
        .unwrap_err();
    assert_eq!(error, MediaError::LocalFilesDisabled);
    assert_eq!(error.fault(), Fault::Forbidden);
}

#[tokio::test]
async fn what_is_no_media_url_is_refused_without_repeating_it() {
    let door = door(None);
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
        let error = door.open(url).await.unwrap_err();
        assert_eq!(error.fault(), fault, "{url}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[tokio::test]
async fn limits_hold_for_every_kind_of_url() {
    let limits = |image| MediaLimits { image, ..MediaLimits::default() };
    let limits_of_bytes = limits(ImageLimits { max_bytes: 100, ..ImageLimits::default() });
    let config = MediaConfig {
        limits: limits_of_bytes,
        allowed_local_media_path: Some(goldens()),
        ..MediaConfig::default()
    };
    let door = MediaDoor::new(config, budget()).unwrap();
    let bytes = file("jpeg-420-37x23.jpg");
    for url in [data_uri(&bytes), format!("file://{}/jpeg-420-37x23.jpg", goldens().display())] {
        assert_eq!(door.open(&url).await.unwrap_err(), MediaError::TooManyBytes { limit: 100 });
    }
    let limits_of_pixels = limits(ImageLimits { max_pixels: 10, ..ImageLimits::default() });
    let door = MediaDoor::new(
        MediaConfig { limits: limits_of_pixels, ..MediaConfig::default() },
        budget(),
    )
    .unwrap();
    assert_eq!(door.open(&data_uri(&bytes)).await.unwrap_err().fault(), Fault::TooLarge);
}

#[tokio::test]
async fn a_door_to_a_directory_that_is_not_there_does_not_open() {
    let missing = goldens().join("missing");
    let config = MediaConfig { allowed_local_media_path: Some(missing), ..MediaConfig::default() };
    assert!(MediaDoor::new(config, budget()).is_err());
}

#[tokio::test]
async fn origins_are_heard_by_threads_that_serve_nobody_else() {
    use std::io::{Read, Write};
    use std::sync::mpsc::channel;
    use std::time::Duration;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/x.png", listener.local_addr().unwrap());
    let (body, (asked, was_asked)) = (file("png-rgba16-37x23.png"), channel());
    let expected = ContentHash::of(&body);
    let origin = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        asked.send(()).unwrap();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(&[head.as_bytes(), &body].concat()).unwrap();
        // Until who asked has all of it.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let door = door(None);
    let mut opening = Box::pin(door.open(url));
    let begun =
        std::future::poll_fn(|context| std::task::Poll::Ready(opening.as_mut().poll(context)))
            .await;
    assert!(begun.is_pending());
    // This thread, which is the only one of the test's, does nothing else.
    was_asked.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(opening.await.unwrap().content, expected);
    drop(door);
    origin.join().unwrap();
}
