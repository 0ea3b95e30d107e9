//! WAVE files of silence by their properties, as `python/audio_goldens/wav.py` builds them.

use serde_json::Value;

const EXTENSIBLE: u16 = 0xFFFE;
const GUID_REST: &[u8] = b"\0\0\0\0\x10\0\x80\0\0\xAA\0\x38\x9B\x71";

/// Builds a file.
pub(crate) fn build(recipe: &Value) -> Vec<u8> {
    let number = |key: &str| recipe[key].as_u64().expect("a number") as u32;
    let short = |key: &str| number(key) as u16;
    let block = short("channels") * short("bits") / 8;
    let is_extensible = recipe["extensible"] == true;
    let mut layout = Vec::new();
    let encoding = if is_extensible { EXTENSIBLE } else { short("encoding") };
    for short in [encoding, short("channels")] {
        layout.extend(short.to_le_bytes());
    }
    for long in [number("rate"), number("rate") * u32::from(block)] {
        layout.extend(long.to_le_bytes());
    }
    for short in [block, short("bits")] {
        layout.extend(short.to_le_bytes());
    }
    if is_extensible {
        for short in [22, short("bits"), 0, 0, short("encoding")] {
            layout.extend(short.to_le_bytes());
        }
        layout.extend(GUID_REST);
    }
    let data = vec![0; number("samples") as usize * usize::from(block)];
    let data_size = recipe["data_size"].as_u64().map_or(data.len() as u32, |size| size as u32);
    let mut content = b"WAVE".to_vec();
    content.extend(chunk(b"fmt ", &layout, layout.len() as u32));
    content.extend(other_chunks(&recipe["before"]));
    content.extend(chunk(b"data", &data, data_size));
    content.extend(other_chunks(&recipe["after"]));
    let mut file = chunk(b"RIFF", &content, content.len() as u32);
    file.truncate(file.len() - recipe["cut"].as_u64().unwrap_or(0) as usize);
    file
}

fn other_chunks(list: &Value) -> Vec<u8> {
    let chunks = list.as_array().into_iter().flatten().map(|entry| {
        let name = entry[0].as_str().expect("a name").as_bytes();
        let size = entry[1].as_u64().expect("a size");
        chunk(name.first_chunk().expect("four bytes"), &vec![0; size as usize], size as u32)
    });
    chunks.flatten().collect()
}

/// Returns a chunk, padded to an even number of bytes.
fn chunk(name: &[u8; 4], body: &[u8], size: u32) -> Vec<u8> {
    let padding: &[u8] = if body.len().is_multiple_of(2) { &[] } else { &[0] };
    [name.as_slice(), &size.to_le_bytes(), body, padding].concat()
}
