//! Tests of origins with TLS, over HTTP/2 and HTTP/1.1.
//!
//! `tls/` holds a certificate authority, the one certificate that it signed (for `origin.test`,
//! valid from 2000 to 2100) and the certificate's key. All are for these tests only. The
//! authority's key was not kept.

use h2::RecvStream;
use h2::server::SendResponse;
use http::{Request, Response};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;

use super::*;

const AUTHORITY: &[u8] = include_bytes!("tls/authority.der");
const CERTIFICATE: &[u8] = include_bytes!("tls/origin.der");
const KEY: &[u8] = include_bytes!("tls/origin.key.der");

/// Returns a fetcher that trusts the tests' authority and resolves every name to 127.0.0.1.
fn trusting_fetcher(limits: &MediaConfig, budget: &ByteBudget) -> Fetcher {
    let mut roots = RootCertStore::empty();
    roots.add(AUTHORITY.into()).unwrap();
    let here: Lookup = Arc::new(|_| Box::pin(async { Ok(vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]) }));
    Fetcher::with(limits, budget.clone(), Arc::new(|_| true), here, roots).unwrap()
}

/// Starts an origin that accepts TLS connections and passes them to `serve`.
async fn encrypted<F, S>(protocol: &'static [u8], serve: F) -> Origin
where
    F: Fn(TlsStream<TcpStream>) -> S + Clone + Send + Sync + 'static,
    S: Future<Output = ()> + Send + 'static,
{
    let mut tls =
        ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![CERTIFICATE.into()], KEY.try_into().unwrap())
            .unwrap();
    tls.alpn_protocols = vec![protocol.into()];
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    Origin::accepting(move |stream| {
        let acceptor = acceptor.clone();
        let serve = serve.clone();
        async move {
            if let Ok(stream) = acceptor.accept(stream).await {
                serve(stream).await;
            }
        }
    })
    .await
}

/// Starts an HTTP/2 origin that passes each request to `answer`.
async fn http2<F, A>(answer: F) -> Origin
where
    F: Fn(Request<RecvStream>, SendResponse<Bytes>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = ()> + Send + 'static,
{
    encrypted(b"h2", move |stream| {
        let answer = answer.clone();
        async move {
            let Ok(mut connection) = h2::server::handshake(stream).await else { return };
            while let Some(Ok((request, respond))) = connection.accept().await {
                tokio::spawn(answer(request, respond));
            }
        }
    })
    .await
}

fn url(origin: &Origin, path: &str) -> Url {
    Url::parse(&format!("https://origin.test:{}{path}", origin.port)).unwrap()
}

#[tokio::test]
async fn fetches_share_a_connection_over_http2() {
    let (sender, mut heads) = mpsc::unbounded_channel();
    let origin = http2(move |request, mut respond| {
        let sender = sender.clone();
        async move {
            sender.send(request.headers().clone()).unwrap();
            let mut body = respond.send_response(Response::new(()), false).unwrap();
            body.send_data(Bytes::from("pixels"), true).unwrap();
        }
    })
    .await;
    let budget = ByteBudget::new(100);
    let fetcher = trusting_fetcher(&config(), &budget);
    for _ in 0..3 {
        assert_eq!(get(&fetcher, url(&origin, "/a")).await.unwrap(), "pixels");
        let head = heads.recv().await.unwrap();
        assert_eq!(head["accept-encoding"], "identity");
        assert!(!head.contains_key("cookie") && !head.contains_key("referer"), "{head:?}");
    }
    assert_eq!((origin.connections.load(Ordering::SeqCst), budget.held()), (1, 0));
}

#[tokio::test]
async fn origin_without_http2_is_fetched_over_http1() {
    let origin = encrypted(b"http/1.1", |mut stream| async move {
        let mut head = [0; 14];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"GET / HTTP/1.1");
        stream.write_all(ok("pixels").as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
    })
    .await;
    assert_eq!(
        get(&trusting_fetcher(&config(), &ByteBudget::new(100)), url(&origin, "/")).await.unwrap(),
        "pixels"
    );
}

#[tokio::test]
async fn untrusted_or_misnamed_certificate_is_refused() {
    let origin =
        http2(|_, mut respond| async move { drop(respond.send_response(Response::new(()), true)) })
            .await;
    let good = url(&origin, "/");
    let budget = ByteBudget::new(100);
    assert_eq!(get(&trusting_fetcher(&config(), &budget), good.clone()).await.unwrap(), "");
    let other = Url::parse(&format!("https://other.test:{}/", origin.port)).unwrap();
    assert_eq!(
        get(&trusting_fetcher(&config(), &budget), other).await.unwrap_err(),
        MediaError::OriginFailed
    );
    let here: Lookup = Arc::new(|_| Box::pin(async { Ok(vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]) }));
    let public = Fetcher::with(&config(), budget, Arc::new(|_| true), here, web_roots()).unwrap();
    assert_eq!(get(&public, good).await.unwrap_err(), MediaError::OriginFailed);
}

#[tokio::test]
async fn redirect_from_https_to_http_is_refused() {
    let plain = Origin::fixed(ok("plain")).await;
    let port = plain.port;
    let origin = http2(move |request, mut respond| async move {
        let target = match request.uri().path() {
            "/downgrade" => format!("http://origin.test:{port}/"),
            "/same" => "/there".to_owned(),
            _ => {
                let mut body = respond.send_response(Response::new(()), false).unwrap();
                body.send_data(Bytes::from("there"), true).unwrap();
                return;
            }
        };
        let redirect = Response::builder().status(302).header("location", target).body(()).unwrap();
        respond.send_response(redirect, true).unwrap();
    })
    .await;
    let fetcher = trusting_fetcher(&config(), &ByteBudget::new(100));
    assert_eq!(get(&fetcher, url(&origin, "/same")).await.unwrap(), "there");
    assert_eq!(
        get(&fetcher, url(&origin, "/downgrade")).await.unwrap_err(),
        MediaError::InvalidRedirect
    );
    assert_eq!(plain.connections.load(Ordering::SeqCst), 0);
    // The opposite redirect is common.
    let upgrade = Origin::fixed(redirect(url(&origin, "/same").as_str())).await;
    assert_eq!(get(&fetcher, upgrade.url("/")).await.unwrap(), "there");
}

#[tokio::test]
async fn hostile_http2_stream_fails_the_fetch() {
    let origin = http2(|request, mut respond| async move {
        match request.uri().path() {
            "/silent" => std::future::pending().await,
            "/reset" => respond.send_reset(h2::Reason::INTERNAL_ERROR),
            "/headers" => {
                let many = (0..2000).fold(Response::builder(), |builder, line| {
                    builder.header(format!("x-{line}"), "0123456789012345678901234567890123456789")
                });
                // The client's limit may already cause an error here.
                let _ = respond.send_response(many.body(()).unwrap(), true);
                std::future::pending().await
            }
            path => {
                let mut body = respond.send_response(Response::new(()), false).unwrap();
                body.send_data(Bytes::from_static(b"x"), false).unwrap();
                match path {
                    "/endless" => {
                        while body.send_data(Bytes::from_static(&[b'x'; 100]), false).is_ok() {
                            tokio::task::yield_now().await;
                        }
                    }
                    "/broken" => body.send_reset(h2::Reason::CANCEL),
                    "/stalled" => std::future::pending().await,
                    _ => unreachable!(),
                }
            }
        }
    })
    .await;
    let short = Duration::from_secs(1);
    let limits = MediaConfig { first_byte_timeout: short, stall_timeout: short, ..config() };
    let budget = ByteBudget::new(1 << 20);
    let fetcher = trusting_fetcher(&limits, &budget);
    for (path, expected) in [
        ("/silent", MediaError::OriginTimeout),
        ("/reset", MediaError::OriginFailed),
        ("/headers", MediaError::OriginFailed),
        ("/endless", MediaError::TooManyBytes { limit: 1000 }),
        ("/broken", MediaError::OriginFailed),
        ("/stalled", MediaError::OriginTimeout),
    ] {
        let outcome =
            tokio::time::timeout(10 * limits.total_timeout, get(&fetcher, url(&origin, path)))
                .await;
        assert_eq!(outcome.unwrap().unwrap_err(), expected, "{path}");
        assert_eq!(budget.held(), 0, "{path}");
    }
}

#[tokio::test]
async fn connection_closed_between_fetches_is_reopened() {
    let origin = encrypted(b"h2", |stream| async move {
        let mut connection = h2::server::handshake(stream).await.unwrap();
        let (_, mut respond) = connection.accept().await.unwrap().unwrap();
        respond.send_response(Response::new(()), true).unwrap();
        connection.graceful_shutdown();
        while connection.accept().await.is_some() {}
    })
    .await;
    let fetcher = trusting_fetcher(&config(), &ByteBudget::new(100));
    for _ in 0..3 {
        assert_eq!(get(&fetcher, url(&origin, "/")).await.unwrap(), "");
    }
    assert_eq!(origin.connections.load(Ordering::SeqCst), 3);
}
