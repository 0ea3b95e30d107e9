use std::net::Ipv4Addr;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use chiasm_backend::fake::{FakeBackend, Script, fake_capabilities};
use chiasm_backend::{Capabilities, Finish, Supports};

use super::*;
use crate::connection::Connection;
use crate::layers;
use crate::test_server::TestServer;

/// A request that no worker supports must reach one all the same: its error names the field. A
/// forwarded request would wait for a server instead.
#[tokio::test]
async fn fleet_of_engines_alone_gets_unsupported_request() {
    let capabilities = Capabilities { supports: Supports::default(), ..fake_capabilities() };
    let backend = FakeBackend::with_capabilities(capabilities);
    backend.next_job(Script::tokens(&[1]).finish(Finish::Length));
    let TestServer { server, .. } = TestServer::forwarding(vec![backend]).await;
    let body = r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2,
        "logprobs": true, "bad_words": ["a"]}"#;
    let request = Request::post("/v1/chat/completions")
        .header(header::HOST, "test")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body))
        .unwrap();
    let connection = Arc::new(Connection::from_peer(Ipv4Addr::LOCALHOST.into()));
    let layers = server.parts().3.clone();
    let answer = layers::answer(server.app(), layers, connection, request).await;
    assert_eq!(answer.status(), StatusCode::OK);
}
