//! Files of media items, which an agent requests.

use tonic::Code;

use super::*;
use crate::proto::MediaChunk;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_is_requested_once_for_all_jobs() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let job = harness.with_picture(&Bytes::from_static(PICTURE));
    harness.engine.next_job(Script::tokens(&[1, 2]).then(1, &[3]).finish(Finish::Length));
    let (mut running, first) = first_output(&*engine, &job).await.unwrap();
    assert_eq!(running.delivered(), MediaDelivery { inline: 1, ..MediaDelivery::default() });
    // The file was sent in this time.
    assert!(running.hand_off() > Duration::ZERO);
    let outputs = [first, running.next().await.unwrap().unwrap()];
    assert_eq!(
        outputs.map(|output| (output.choice, output.finish)),
        [(0, None), (1, Some(Finish::Length))]
    );
    // The agent's job has ended, but the first continuation has not.
    assert!(matches!(running.next().await, Some(Err(JobError::Unfinished))));
    assert!(running.next().await.is_none());
    assert_eq!(harness.engine.requested_items(), [job.media[0].hash]);
    harness.engine.next_job(Script::tokens(&[1]));
    assert_eq!(
        delivered(&*engine, &job).await.unwrap(),
        MediaDelivery { cached: 1, ..MediaDelivery::default() }
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_that_differs_from_its_announcement_is_refused() {
    let harness = TestHarness::new().await;
    let (_, mut files) = harness.link.clients();
    let content = Bytes::copy_from_slice(ContentHash::digest(PICTURE).as_bytes());
    let first = MediaChunk {
        content: content.clone(),
        length: PICTURE.len() as u64,
        modality: "image".to_owned(),
        bytes: Bytes::from_static(&PICTURE[..100]),
    };
    let rest = MediaChunk { bytes: Bytes::from_static(&PICTURE[100..]), ..MediaChunk::default() };
    let mut put =
        async |chunks: Vec<MediaChunk>| files.put_media(tokio_stream::iter(chunks)).await.map(drop);
    put(vec![first.clone(), rest.clone()]).await.unwrap();
    let all_permits = harness
        .file_permits
        .try_acquire_many(harness.file_permits.available_permits() as u32)
        .unwrap();
    assert_eq!(
        put(vec![first.clone(), rest.clone()]).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    drop(all_permits);
    for chunks in [
        vec![],
        vec![first.clone()],
        vec![first.clone(), rest.clone(), rest.clone()],
        vec![MediaChunk { content: Bytes::from_static(&[1; 32]), ..first.clone() }, rest.clone()],
        vec![MediaChunk { content: Bytes::new(), ..first.clone() }, rest.clone()],
        vec![MediaChunk { length: u64::MAX, ..first.clone() }, rest.clone()],
        vec![MediaChunk { bytes: Bytes::from_static(b"GIF"), ..first.clone() }, rest],
    ] {
        let status = put(chunks.clone()).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status} {chunks:?}");
    }
}
