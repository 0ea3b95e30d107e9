use axum::body::Body;

use super::*;

fn allow(names: &[&str]) -> AllowList {
    AllowList::new(names.iter().map(|name| (*name).to_owned()).collect())
}

fn cors(origins: &[&str], methods: &[&str], headers: &[&str], allows_credentials: bool) -> Cors {
    Cors::new(allow(origins), allow(methods), allow(headers), allows_credentials).unwrap()
}

fn request(method: &str, headers: &[(&str, &str)]) -> Request {
    let builder = Request::builder().method(method).uri("/v1/models");
    let builder =
        headers.iter().fold(builder, |builder, (name, value)| builder.header(*name, *value));
    builder.body(Body::empty()).unwrap()
}

/// Returns the response to a preflight: the status, and the CORS headers without `access-control-`
/// in their names.
fn preflight(cors: &Cors, origin: &str, method: &str, headers: Option<&str>) -> (u16, Vec<String>) {
    let mut sent = vec![("origin", origin), ("access-control-request-method", method)];
    sent.extend(headers.map(|headers| ("access-control-request-headers", headers)));
    let mut response = cors.preflight(&request("OPTIONS", &sent)).unwrap();
    cors.add_headers(Some(&origin.parse().unwrap()), response.headers_mut());
    (response.status().as_u16(), cors_headers(response.headers()))
}

fn cors_headers(headers: &HeaderMap) -> Vec<String> {
    let lines = headers.iter().filter_map(|(name, value)| {
        let name = name.as_str().strip_prefix("access-control-")?;
        Some(format!("{name}: {}", value.to_str().unwrap()))
    });
    let mut lines: Vec<_> = lines.collect();
    lines.sort();
    lines
}

/// Returns the CORS headers of a response to a page of this origin.
fn simple(cors: &Cors, origin: Option<&str>) -> Vec<String> {
    let mut headers = HeaderMap::new();
    cors.add_headers(origin.map(|origin| origin.parse().unwrap()).as_ref(), &mut headers);
    assert_eq!(headers[VARY], "origin");
    cors_headers(&headers)
}

#[test]
fn wildcard_policy_allows_every_origin() {
    let all = cors(&["*"], &["*"], &["*"], false);
    let expected = [
        "allow-methods: DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT",
        "allow-origin: *",
        "max-age: 600",
    ];
    assert_eq!(
        preflight(&all, "https://a.example", "POST", None),
        (200, expected.map(str::to_owned).to_vec())
    );
    let (status, headers) = preflight(&all, "null", "PATCH", Some("Authorization, x-a"));
    assert_eq!((status, headers[0].as_str()), (200, "allow-headers: Authorization, x-a"));
    assert_eq!(simple(&all, Some("https://a.example")), ["allow-origin: *"]);
    assert_eq!(simple(&all, None), [""; 0]);
    // With credentials each origin is echoed.
    let all = cors(&["*"], &["*"], &["*"], true);
    let expected = ["allow-credentials: true", "allow-origin: https://a.example"];
    assert_eq!(simple(&all, Some("https://a.example")), expected);
    let (status, headers) = preflight(&all, "https://a.example", "POST", None);
    assert_eq!(
        (status, &headers[0], &headers[2]),
        (200, &expected[0].to_owned(), &expected[1].to_owned())
    );
}

#[test]
fn listed_origins_get_listed_methods_with_headers() {
    let some =
        cors(&["https://a.example", "http://localhost:3000"], &["POST"], &["Authorization"], false);
    for origin in ["https://a.example", "http://localhost:3000"] {
        let (status, headers) =
            preflight(&some, origin, "POST", Some("content-type,AUTHORIZATION"));
        let allowed =
            "allow-headers: authorization, accept, accept-language, content-language, content-type";
        let expected =
            [allowed, "allow-methods: POST", &format!("allow-origin: {origin}"), "max-age: 600"];
        assert_eq!((status, headers), (200, expected.map(str::to_owned).to_vec()));
        assert_eq!(simple(&some, Some(origin)), [format!("allow-origin: {origin}")]);
    }
    for wrong in [
        "https://b.example",
        "https://a.example:8443",
        "http://a.example",
        "https://A.example",
        "null",
    ] {
        assert_eq!(preflight(&some, wrong, "POST", None), (400, vec![]), "{wrong}");
        assert_eq!(simple(&some, Some(wrong)), [""; 0], "{wrong}");
    }
    // An allowed origin may read the error.
    let refused = (400, vec!["allow-origin: https://a.example".to_owned()]);
    assert_eq!(preflight(&some, "https://a.example", "GET", None), refused);
    assert_eq!(preflight(&some, "https://a.example", "POST", Some("authorization, x-a")), refused);
}

#[test]
fn only_preflights_are_answered() {
    let all = cors(&["*"], &["*"], &["*"], false);
    let origin = ("origin", "https://a.example");
    let method = ("access-control-request-method", "POST");
    for (sent, headers) in [
        ("OPTIONS", &[][..]),
        ("OPTIONS", &[origin]),
        ("OPTIONS", &[method]),
        ("POST", &[origin, method]),
    ] {
        assert!(all.preflight(&request(sent, headers)).is_none(), "{sent} {headers:?}");
    }
}

#[test]
fn invalid_names_are_refused() {
    let new = |origin: &str, method: &str, header: &str| {
        Cors::new(allow(&[origin]), allow(&[method]), allow(&[header]), false).map(drop)
    };
    for fine in ["https://a.example", "http://[::1]:8080", "chrome-extension://abc", "null", "*"] {
        assert_eq!(new(fine, "*", "*"), Ok(()), "{fine}");
    }
    let all = [
        "a.example",
        "https://",
        "://a",
        "https://a.example/",
        "https://A.example",
        "https://a.example:443",
    ];
    for wrong in all.into_iter().chain([
        "http://a.example:80",
        "https://*.example",
        "https://a b",
        "",
        "https://ä.example",
    ]) {
        assert_eq!(new(wrong, "*", "*"), Err(CorsError::Origin(wrong.to_owned())));
    }
    assert_eq!(new("*", "PO ST", "*"), Err(CorsError::Method("PO ST".to_owned())));
    assert_eq!(new("*", "*", "x: y"), Err(CorsError::Header("x: y".to_owned())));
}
