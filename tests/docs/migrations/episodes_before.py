import av
import pyarrow.parquet as pq
import torch
from model import Model


class Episodes(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.items = []
        for number in range(2):
            actions = pq.read_table(f"{folder}/data/{number}.parquet")["action"].to_pylist()
            with av.open(f"{folder}/videos/{number}.mp4") as video:
                frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
            chunks = [
                [actions[min(frame_number + step, len(actions) - 1)] for step in range(3)]
                for frame_number in range(len(actions))
            ]
            self.items += zip(frames, chunks, strict=True)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        frame, chunk = self.items[index]
        return torch.from_numpy(frame).permute(2, 0, 1), torch.tensor(chunk)


model = Model()
optimiser = torch.optim.SGD(model.parameters(), 1e-3)
loader = torch.utils.data.DataLoader(Episodes("robot"), batch_size=2, shuffle=True)
for _ in range(2):
    for images, actions in loader:
        loss = model(images, actions)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
