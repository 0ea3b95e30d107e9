//! Files of media items, which an agent asks for.

use tonic::Code;

use super::*;
use crate::proto::MediaChunk;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_is_asked_for_once_and_tensors_are_made_beside_the_engine() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let told = stand.with_picture(&Bytes::from_static(PICTURE));
    stand.engine.next_job(Script::tokens(&[1, 2]).then(1, &[3]).finish(Finish::Length));
    let (mut running, first) = begun(&*engine, &told).await.unwrap();
    assert_eq!(running.delivered(), Delivered { inline: 1, ..Delivered::default() });
    // The file was sent meanwhile.
    assert!(running.hand_off() > Duration::ZERO);
    let outputs = [first, running.next().await.unwrap().unwrap()];
    assert_eq!(
        outputs.map(|output| (output.choice, output.finish)),
        [(0, None), (1, Some(Finish::Length))]
    );
    // The agent's end without that of the first continuation.
    assert!(matches!(running.next().await, Some(Err(JobError::Unfinished))));
    assert!(running.next().await.is_none());
    assert_eq!(stand.engine.pulled(), [told.media[0].hash]);
    stand.engine.next_job(Script::tokens(&[1]));
    assert_eq!(
        delivered(&*engine, &told).await.unwrap(),
        Delivered { cached: 1, ..Delivered::default() }
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_file_that_was_named_is_taken_and_no_more_than_was_said() {
    let stand = Stand::new().await;
    let (_, mut files) = stand.link.clients();
    let content = Bytes::copy_from_slice(ContentHash::of(PICTURE).as_bytes());
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
    let all = stand
        .places_of_files
        .try_acquire_many(stand.places_of_files.available_permits() as u32)
        .unwrap();
    assert_eq!(
        put(vec![first.clone(), rest.clone()]).await.unwrap_err().code(),
        Code::ResourceExhausted
    );
    drop(all);
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
