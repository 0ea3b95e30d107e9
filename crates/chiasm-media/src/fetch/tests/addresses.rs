//! Tests of the fetch policy: allowed and forbidden hosts, ports and addresses.

use super::*;

#[tokio::test]
async fn redirect_to_forbidden_url_is_refused() {
    for (target, expected) in [
        ("http://127.0.0.2/", MediaError::AddressForbidden),
        ("http://[::1]/", MediaError::AddressForbidden),
        ("//0x7f000002/", MediaError::AddressForbidden),
        ("http://169.254.169.254/latest/meta-data/", MediaError::AddressForbidden),
        ("http://[::ffff:10.0.0.1]/", MediaError::AddressForbidden),
        ("http://[::ffff:a9fe:a9fe]/", MediaError::AddressForbidden),
        ("http://inside.test/", MediaError::AddressForbidden),
        ("http://user:secret@127.0.0.1/", MediaError::InvalidRedirect),
        ("file:///etc/passwd", MediaError::InvalidRedirect),
        ("ftp://127.0.0.1/", MediaError::InvalidRedirect),
        ("http://", MediaError::InvalidRedirect),
        ("http://[fe80::1%25eth0]/", MediaError::InvalidRedirect),
        ("data:;base64,QUJD", MediaError::InvalidRedirect),
    ] {
        let origin = Origin::fixed(redirect(target)).await;
        let fetcher = guarded_fetcher(names(&[("inside.test", &["10.0.0.7", "127.0.0.2"])]));
        assert_eq!(get(&fetcher, origin.url("/")).await.unwrap_err(), expected, "{target}");
    }
}

#[tokio::test]
async fn names_resolve_only_to_allowed_addresses() {
    let origin = Origin::fixed(ok("public")).await;
    let entries: &[(&str, &[&str])] = &[
        ("public.test", &["127.0.0.1"]),
        ("mixed.test", &["127.0.0.2", "127.0.0.1"]),
        ("private.test", &["127.0.0.2"]),
        ("empty.test", &[]),
    ];
    let fetcher = guarded_fetcher(names(entries));
    let get_from =
        |host: &str| get(&fetcher, Url::parse(&format!("http://{host}:{}/", origin.port)).unwrap());
    assert_eq!(get_from("public.test").await.unwrap(), "public");
    assert_eq!(get_from("mixed.test").await.unwrap(), "public");
    assert_eq!(origin.connections.load(Ordering::SeqCst), 2);
    let error = get_from("private.test").await.unwrap_err();
    assert_eq!(error, MediaError::AddressForbidden);
    assert!(!error.to_string().contains("127"));
    assert_eq!(get_from("empty.test").await.unwrap_err(), MediaError::OriginFailed);
    assert_eq!(get_from("unknown.test").await.unwrap_err(), MediaError::OriginFailed);
    assert_eq!(origin.connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn default_policy_refuses_this_machine_under_any_name() {
    let origin = Origin::fixed(ok("secret")).await;
    let fetcher =
        fetcher(&MediaConfig { allowed_ports: Some(vec![origin.port]), ..MediaConfig::default() });
    for host in [
        "127.0.0.1",
        "localhost",
        "0.0.0.0",
        "127.0.0.1.",
        "127.1",
        "2130706433",
        "0177.0.0.1",
        "0x7f.1",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "169.254.169.254",
        "10.0.0.1",
    ] {
        let url = Url::parse(&format!("http://{host}:{}/", origin.port)).unwrap();
        assert_eq!(get(&fetcher, url).await.unwrap_err(), MediaError::AddressForbidden, "{host}");
    }
    assert_eq!(origin.connections.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn url_with_credentials_is_refused_without_echo() {
    for url in
        ["http://user@127.0.0.1/", "http://:secret@127.0.0.1/", "https://user:secret@127.0.0.1/"]
    {
        let error = get(&open_fetcher(), Url::parse(url).unwrap()).await.unwrap_err();
        assert_eq!(error, MediaError::CredentialsInUrl);
        assert!(!error.to_string().contains("secret"));
    }
}

/// The rule allows only the first check, which is for the client's URL. The redirect leads to the
/// same address.
#[tokio::test]
async fn redirect_to_the_same_address_is_checked_again() {
    let checks = AtomicUsize::new(0);
    let rule = move |_| checks.fetch_add(1, Ordering::SeqCst) == 0;
    let origin = Origin::start(|_, mut stream| async move {
        let port = stream.local_addr().unwrap().port();
        stream
            .write_all(redirect(&format!("http://127.0.0.1:{port}/admin")).as_bytes())
            .await
            .unwrap();
    })
    .await;
    let fetcher =
        Fetcher::with(&config(), ByteBudget::new(0), Arc::new(rule), no_names(), web_roots())
            .unwrap();
    assert_eq!(get(&fetcher, origin.url("/")).await.unwrap_err(), MediaError::AddressForbidden);
    assert_eq!(origin.connections.load(Ordering::SeqCst), 1);
}

/// Returns a look-up whose answers change, and a counter of its calls.
fn changing_name(answers: &'static [&'static str]) -> (Lookup, Arc<AtomicUsize>) {
    let lookups = Arc::new(AtomicUsize::new(0));
    let count = lookups.clone();
    let lookup: Lookup = Arc::new(move |_| {
        let answer = answers[count.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1)];
        Box::pin(async move { Ok(vec![answer.parse().unwrap()]) })
    });
    (lookup, lookups)
}

#[tokio::test]
async fn connection_uses_the_checked_address() {
    let origin = Origin::fixed(ok("public")).await;
    let url = Url::parse(&format!("http://rebinding.test:{}/", origin.port)).unwrap();

    let (lookup, lookups) = changing_name(&["127.0.0.1", "127.0.0.2"]);
    let fetcher = guarded_fetcher(lookup);
    assert_eq!(get(&fetcher, url.clone()).await.unwrap(), "public");
    assert_eq!((lookups.load(Ordering::SeqCst), origin.connections.load(Ordering::SeqCst)), (1, 1));
    // The next connection looks the name up again, and checks it again.
    assert_eq!(get(&fetcher, url.clone()).await.unwrap_err(), MediaError::AddressForbidden);
    assert_eq!((lookups.load(Ordering::SeqCst), origin.connections.load(Ordering::SeqCst)), (2, 1));

    let (lookup, lookups) = changing_name(&["10.0.0.1", "127.0.0.1"]);
    assert_eq!(get(&guarded_fetcher(lookup), url).await.unwrap_err(), MediaError::AddressForbidden);
    assert_eq!((lookups.load(Ordering::SeqCst), origin.connections.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test]
async fn redirect_to_the_same_name_is_checked_again() {
    let origin = Origin::fixed(redirect("/again")).await;
    let (lookup, lookups) = changing_name(&["127.0.0.1", "169.254.169.254"]);
    let url = Url::parse(&format!("http://rebinding.test:{}/", origin.port)).unwrap();
    assert_eq!(get(&guarded_fetcher(lookup), url).await.unwrap_err(), MediaError::AddressForbidden);
    assert_eq!((lookups.load(Ordering::SeqCst), origin.connections.load(Ordering::SeqCst)), (2, 1));
}

#[tokio::test]
async fn host_rules_apply_to_every_redirect() {
    let allowed = |rules: &[&str], ports| MediaConfig {
        allowed_domains: rules.iter().map(|rule| rule.parse().unwrap()).collect(),
        allowed_ports: ports,
        ..config()
    };
    let lookup =
        || names(&[("a.example.test", &["127.0.0.1"]), ("b.example.test", &["127.0.0.1"])]);
    let build = |config| {
        Fetcher::with(&config, ByteBudget::new(1000), Arc::new(|_| true), lookup(), web_roots())
            .unwrap()
    };
    let other = Origin::fixed(ok("there")).await;
    let origin = Origin::fixed(redirect(&format!("http://b.example.test:{}/", other.port))).await;
    let url = Url::parse(&format!("http://a.example.test:{}/", origin.port)).unwrap();

    for (rules, ports, expected) in [
        (&["*.example.test"][..], None, Ok(Bytes::from("there"))),
        (&["A.example.test", "b.EXAMPLE.test."], None, Ok(Bytes::from("there"))),
        (&["a.example.test"], None, Err(MediaError::HostForbidden)),
        (&["*.example.test"], Some(vec![origin.port]), Err(MediaError::PortForbidden)),
        (&["*.example.test"], Some(vec![origin.port, other.port]), Ok(Bytes::from("there"))),
        (&[], Some(vec![80, 443]), Err(MediaError::PortForbidden)),
    ] {
        let outcome = get(&build(allowed(rules, ports.clone())), url.clone()).await;
        assert_eq!(outcome, expected, "{rules:?} {ports:?}");
        assert!(!outcome.is_err_and(|error| error.fault() != Fault::Forbidden));
    }
}
