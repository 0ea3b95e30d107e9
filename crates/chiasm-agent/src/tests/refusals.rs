//! Refusals of an agent: other protocol versions, too many watches of one address, and plans that
//! the agent would make differently.

use tonic::Code;

use super::*;
use crate::client::LinkError;
use crate::proto::{HelloRequest, WatchRequest};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_protocol_versions_are_refused() {
    let harness = TestHarness::new().await;
    assert_eq!(harness.link.greet().await.unwrap().engines, 1);
    let hello = |oldest_protocol, newest_protocol| HelloRequest {
        oldest_protocol,
        newest_protocol,
        key_secret_fingerprint: Bytes::copy_from_slice(
            &chiasm_kv::KeySecret::for_process().fingerprint(),
        ),
    };
    let (mut jobs, _) = harness.link.clients();
    assert_eq!(jobs.hello(hello(1, 7)).await.unwrap().into_inner().protocol, 2);
    for (oldest, newest) in [(3, 4), (0, 1)] {
        let status = jobs.hello(hello(oldest, newest)).await.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("versions 2 to 2"), "{status}");
    }
    assert_eq!(
        jobs.watch(WatchRequest { engine: 1, frontend: 9 }).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    for address in ["", "a", ":1", "a:b", "a:65536"] {
        assert!(matches!(AgentLink::new(address, None), Err(LinkError::Address(_))), "{address}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_of_one_address_leave_slots_to_others() {
    let harness = TestHarness::new().await;
    let (mut jobs, _) = harness.link.clients();
    let mut guard = harness.watches.for_peer(Peer::from_address([127, 0, 0, 1].into())).empty();
    while guard.grow(1).is_ok() {}
    assert_eq!(guard.count(), 2048);
    let watch = WatchRequest { engine: 0, frontend: 9 };
    assert_eq!(jobs.watch(watch).await.unwrap_err().code(), Code::ResourceExhausted);
    assert!(harness.watches.for_peer(Peer::from_address([127, 0, 0, 2].into())).acquire(1).is_ok());
    guard.clear();
    let mut events = jobs.watch(watch).await.unwrap().into_inner();
    assert!(events.message().await.unwrap().is_some());
    // A frontend that disconnects releases its slot.
    drop(events);
    let released = async {
        while guard.grow(2048).is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), released).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_plans_never_reach_the_engine() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let planned = harness.with_picture(&Bytes::from_static(PICTURE));
    let refusal = |job: Job| {
        let engine = engine.clone();
        async move {
            match delivered(&*engine, &job).await {
                Err(JobError::Refused { message, .. }) => message,
                Err(error) => panic!("{error}"),
                Ok(_) => panic!("the job was accepted"),
            }
        }
    };
    let with_item = |change: &dyn Fn(&mut JobItem)| {
        let mut item = planned.media[0].clone();
        change(&mut item);
        Job { media: vec![item].into(), ..planned.clone() }
    };
    let other_hash = with_item(&|item| item.hash = MmHash::new([1; 32]));
    assert!(refusal(other_hash).await.contains("identity"));
    for placeholder in [
        Placeholder { offset: 2, ..planned.media[0].placeholder.clone() },
        Placeholder { length: 3, ..planned.media[0].placeholder.clone() },
    ] {
        let message = refusal(with_item(&|item| item.placeholder = placeholder.clone())).await;
        assert!(message.contains("placeholder"), "{message}");
    }
    let twice = Job {
        media: vec![planned.media[0].clone(), planned.media[0].clone()].into(),
        ..planned.clone()
    };
    assert!(refusal(twice).await.contains("media[1]"));
    assert!(
        refusal(with_item(&|item| item.modality = Modality::Audio))
            .await
            .contains("does not support")
    );
    let unknown = harness.model.last_token().0 + 1;
    assert!(refusal(job(&[TokenId(unknown)])).await.contains("vocabulary"));
    assert!(refusal(job(&[])).await.contains("empty"));
    assert!(refusal(job(&[TokenId(1); 4096])).await.contains("4096"));
    assert!(harness.engine.jobs().is_empty());
}
