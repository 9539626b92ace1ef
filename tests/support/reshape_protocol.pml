/* How ranks that die, join and lag share the steps of a run by reshape, commit and rollback: a model for Spin.

   A round is one attempt at a step. Any ranks may be dealt into one, the others are late; several rounds may be under
   way at once, beside each other. Whoever is behind loads the state of the rank that is ahead, or fails to. A step may
   fail on any rank at any time, also where it succeeds on others. A rank dies at any time, and a new one joins in its
   place. Nothing bounds the number of rounds and deaths.

   What must hold: a step that any rank commits has each row of its global batch once; and the weights of each rank are
   those after all steps before its position, each applied once. */

#ifndef RANKS
#define RANKS 4
#endif
#ifndef SLOTS
#define SLOTS RANKS /* rounds that may be under way at once */
#endif
#define ROWS 5  /* of a global batch: shares differ by a row */
#ifndef STEPS
#define STEPS 2
#endif

#define IDLE 0
#define DEALT 1
#define WAITS 2

typedef Round {
    byte members, contributed, left; /* ranks, as bits */
    byte step, applied;              /* the position of the rank that is ahead, and its weights */
    byte rows, twice;                /* rows in the sum of the gradients, and those that are in it twice, as bits */
};

typedef Replica {
    byte state, round;
    byte dealt_rank, dealt_size; /* what the round says */
    byte rank, size;             /* the loader's world */
    byte position, next;         /* steps committed; the step that the loader hands out next */
    byte applied;                /* the steps in the weights, as bits */
};

Round rounds[SLOTS];
Replica replicas[RANKS];

#define OWN replicas[i]
#define ITS rounds[OWN.round]
#ifdef EARLY_COMMIT
#define IS_COMPLETE true
#else
#define IS_COMPLETE (ITS.contributed == ITS.members)
#endif

inline leave() { /* what nobody refers to any more is no part of the state */
    ITS.left = ITS.left | (1 << i);
    if
    :: ITS.left == ITS.members ->
        ITS.members = 0; ITS.contributed = 0; ITS.left = 0; ITS.step = 0; ITS.applied = 0; ITS.rows = 0; ITS.twice = 0
    :: else
    fi;
    OWN.state = IDLE; OWN.round = 0; OWN.dealt_rank = 0; OWN.dealt_size = 0
}

active proctype Quorum() {
    byte i, slot, size;
    end: do
    :: atomic { true ->
            slot = 0;
            do
            :: slot < SLOTS && rounds[slot].members -> slot++
            :: else -> break
            od;
            if
            :: slot < SLOTS ->
                do
                :: i < RANKS ->
                    if
                    :: OWN.state == IDLE && OWN.position < STEPS ->
                        OWN.state = DEALT; OWN.round = slot; OWN.dealt_rank = size; size++;
                        rounds[slot].members = rounds[slot].members | (1 << i);
                        if
                        :: OWN.position >= rounds[slot].step ->
                            rounds[slot].step = OWN.position; rounds[slot].applied = OWN.applied
                        :: else
                        fi
                    :: true /* is late, or has died */
                    fi;
                    i++
                :: else -> break
                od;
                i = 0;
                do
                :: i < RANKS ->
                    if
                    :: rounds[slot].members & (1 << i) -> OWN.dealt_size = size
                    :: else
                    fi;
                    i++
                :: else -> break
                od
            :: else
            fi;
            i = 0; size = 0; slot = 0
        }
    od
}

active [RANKS] proctype Rank() {
    byte i = _pid - 1, row;
    bool takes_part;
    end: do
    :: atomic { OWN.state == DEALT ->
            takes_part = true;
            if
            :: OWN.position == ITS.step
            :: OWN.position < ITS.step -> /* load_state_dict */
#ifndef NO_STATE
                OWN.position = ITS.step; OWN.next = ITS.step; OWN.applied = ITS.applied
#endif
            :: OWN.position < ITS.step -> takes_part = false /* the state did not come */
            fi;
            if
            :: OWN.rank == OWN.dealt_rank && OWN.size == OWN.dealt_size /* nothing to reshape */
#ifdef NO_RESHAPE
            :: OWN.size > 0 && OWN.size != OWN.dealt_size
#endif
            :: else -> OWN.rank = OWN.dealt_rank; OWN.size = OWN.dealt_size; OWN.next = OWN.position
            fi;
            if
            :: takes_part -> /* a batch, and its gradients into the sum */
                assert(OWN.next == ITS.step);
                OWN.next++;
                row = OWN.rank * ROWS / OWN.size;
                do
                :: row < (OWN.rank + 1) * ROWS / OWN.size ->
                    ITS.twice = ITS.twice | (ITS.rows & (1 << row));
                    ITS.rows = ITS.rows | (1 << row);
                    row++
                :: else -> break
                od;
                ITS.contributed = ITS.contributed | (1 << i)
            :: else
            fi;
            row = 0; takes_part = false; OWN.state = WAITS
        }

    :: atomic { OWN.state == WAITS && (ITS.contributed & (1 << i)) && IS_COMPLETE -> /* commit */
            assert(ITS.rows == (1 << ROWS) - 1 && ITS.twice == 0);
            assert(OWN.applied == (1 << (OWN.next - 1)) - 1);
            OWN.applied = OWN.applied | (1 << (OWN.next - 1));
            OWN.position = OWN.next;
            leave();
            if
            :: OWN.position == STEPS -> OWN.rank = 0; OWN.size = 0 /* its world is of no matter any more */
            :: else
            fi
        }

    :: atomic { OWN.state == WAITS -> /* the step fails here: rollback */
#ifndef NO_ROLLBACK
            OWN.next = OWN.position;
#endif
            leave()
        }

    :: atomic { OWN.state != IDLE -> /* dies; a new one is at the beginning */
            leave();
            OWN.rank = 0; OWN.size = 0; OWN.position = 0; OWN.next = 0; OWN.applied = 0
        }

    :: atomic { OWN.state == IDLE && OWN.next > 0 ->
            OWN.rank = 0; OWN.size = 0; OWN.position = 0; OWN.next = 0; OWN.applied = 0
        }
    od
}
